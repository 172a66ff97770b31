"""Several hosts as one run: one result, one commit at a notice, and nobody outlives a lost one."""

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from contract.errors import Exit, UserError
from tests.training import tiny
from tests.training.hooks import notice, send
from tests.training.runs import Run, assert_equal, ended, free_port, wait_for
from training.durable.attempt.ranks import Hosts, RankProcess, _Meeting, _probe, meet
from training.durable.attempt.supervisor import Supervisor
from training.durable.attempt.world import RankEnvironment
from training.durable.errors import AttemptEndedError, InterruptedRunError

_FIRST, _SECOND = "127.0.0.1", "127.0.0.2"


def at_host(name: str, step: int, act: Callable[[], None]) -> None:
    """Act once, at a step, in one host of those forked from here."""

    def hook(reached: int) -> None:
        if reached == step and os.environ["TEST_HOST"] == name:
            tiny.HOOKS.clear()
            act()

    tiny.HOOKS["first"] = hook


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_two_hosts_give_the_bits_of_one_whatever_happens_to_either(run: Run, pair: Run) -> None:
    at_host(_SECOND, 3, lambda: send(signal.SIGTERM))
    assert ended(run.fork_hosts(2)) == [75, 75], "SageMaker's notice to one host ends both"
    assert run.head.state == "released"
    assert run.head.checkpoints[-1].step == run.lines("step")[-1]["step"], "nothing was lost"
    at_host(_SECOND, 7, kill)
    assert ended(run.fork_hosts(2)) == [75, -9]
    at_host(_FIRST, 9, kill)
    assert ended(run.fork_hosts(2)) == [-9, 75]
    tiny.HOOKS.clear()
    assert ended(run.fork_hosts(2)) == [0, 0]
    assert_equal(run, pair)
    assert len(run.events("take-over")) == 4, "the first host alone holds the run"


def test_a_host_that_holds_the_others_up_is_named_once_and_each_stage_s_own_ranks_are(
    run: Run,
) -> None:
    def hold_up(_: int) -> None:
        if os.environ["TEST_HOST"] == _SECOND:
            time.sleep(0.3)

    tiny.HOOKS.update(first=hold_up, second=lambda _: notice())
    assert ended(run.fork_hosts(2)) == [75, 75]
    events = [event for event in run.events("slow-rank") if event["stage"] == "first"]
    assert len(events) == 1
    assert f"all ranks wait for rank 1 of host {_SECOND}: " in events[0]["message"]
    (usual, slow), *_ = (line["own_seconds"] for line in run.lines("ranks"))
    assert slow >= 0.3 > usual
    tiny.HOOKS.clear()
    assert ended([run.fork("--num-processes=2")]) == [0]
    assert f"<td>first</td><td>rank 1 of host {_SECOND}</td>" in run.page
    assert "<td>second</td><td>rank 1</td>" in run.page


def test_a_rank_that_hangs_ends_the_attempt_on_all_hosts(run: Run, pair: Run) -> None:
    at_host(_SECOND, 5, lambda: time.sleep(90))
    assert ended(run.fork_hosts(2, "--watchdog-seconds=3")) == [1, 75]
    assert run.head.checkpoints[-1].step == 3
    tiny.HOOKS.clear()
    assert ended(run.fork_hosts(2)) == [0, 0]
    assert_equal(run, pair)


def test_an_evaluation_before_the_first_step_names_no_host(run: Run) -> None:
    at_host(_SECOND, 6, kill)
    assert ended(run.fork_hosts(2, "--checkpoint-interval=4steps")) == [75, -9]
    assert run.head.checkpoints[-1].step == 4, "an epoch, not yet evaluated"
    tiny.HOOKS.clear()
    assert ended(run.fork_hosts(2)) == [0, 0]
    assert not [event for event in run.events("slow-rank") if "takes it 0 s" in event["message"]]


def test_a_run_of_two_hosts_goes_on_with_one(run: Run, whole: Run) -> None:
    at_host(_FIRST, 5, notice)
    assert ended(run.fork_hosts(2, "--usd-per-hour=1.5")) == [75, 75]
    assert run.events("take-over")[0]["usd_per_hour"] == 3.0, "of both machines"
    tiny.HOOKS.clear()
    assert run.attempt() == 0
    assert_equal(run, whole)


def _on(number: int, port: int) -> Hosts:
    return Hosts(names=(_FIRST, _SECOND), own=(_FIRST, _SECOND)[number], port=port)


@contextmanager
def _joined(facts: dict[str, int], port: int) -> Iterator[list[BaseException | _Meeting]]:
    """The second host in a thread; what comes of it is there at the end."""
    found: list[BaseException | _Meeting] = []

    def join() -> None:
        try:
            found.append(meet(_on(1, port), facts, lambda: None))
        except (UserError, AttemptEndedError) as error:
            found.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    yield found
    thread.join(30)


def test_hosts_meet_and_hear_of_each_others_end() -> None:
    port, heard = free_port(), threading.Event()
    said: list[tuple[str, float]] = []

    def tell(why: str, grace_seconds: float = 0.0) -> None:
        said.append((why, grace_seconds))
        heard.set()

    with _joined({"ranks": 1}, port) as found:
        # What is no host of ours is let in by the port, and sent away.
        stranger = threading.Thread(target=_call, args=(port,))
        stranger.start()
        first = meet(_on(0, port), {"ranks": 1}, lambda: None)
        stranger.join(30)
    (second,) = found
    assert isinstance(second, _Meeting)
    assert first.address == second.address and first.address.startswith(f"tcp://{_FIRST}:")
    first.watch(tell)
    second.close()
    assert heard.wait(30) and said == [(f"host {_SECOND} has ended", 5.0)]
    first.close()


class _Attempt:
    """The second host's attempt of two ranks, whose other rank ends once it is told to."""

    def __init__(self, run: Run) -> None:
        self.port, self.failed = free_port(), queue.SimpleQueue[tuple[str, int]]()
        self.other: subprocess.Popen[bytes] | None = None
        self._supervisor, self._scratch = Supervisor(budget_seconds=20), run.scratch
        self._supervisor.last_resort.fail = self._fail  # type: ignore[method-assign]
        self._supervisor.last_resort.end_without = lambda *_: None  # type: ignore[method-assign]
        self.may_fail = threading.Event()

    def _fail(self, why: str, code: Exit = Exit.FAILED) -> None:
        self.may_fail.wait(30)
        self.failed.put((why, code))

    def _start(self, variables: Mapping[str, str]) -> RankProcess:
        words = [sys.executable, "-c", "import sys; sys.stdin.read(1) and sys.exit(1)"]
        self.other = subprocess.Popen(words, stdin=subprocess.PIPE)
        return self.other

    def end_other(self) -> None:
        assert self.other is not None and self.other.stdin is not None
        self.other.stdin.write(b"x")
        self.other.stdin.flush()

    @contextmanager
    def met(self, heard: Callable[[str, float], None]) -> Iterator[_Meeting]:
        """Let it meet the first host, which is this process; `heard` is what it hears."""
        first = list[_Meeting]()
        thread = threading.Thread(
            target=lambda: first.append(meet(_on(0, self.port), {"ranks": 2}, lambda: None))
        )
        thread.start()
        with RankEnvironment(hosts=_on(1, self.port)).meeting(
            self._supervisor, 2, self._scratch, {}, arguments=[], start=self._start
        ):
            thread.join(30)
            first[0].watch(heard)
            yield first[0]
            self.may_fail.set()
            first[0].close()


def test_a_host_s_own_rank_that_ends_after_another_host_is_no_failure_of_its_own(run: Run) -> None:
    attempt = _Attempt(run)
    attempt.may_fail.set()
    with attempt.met(lambda why, grace: None) as first:
        first.close()
        time.sleep(0.5)  # less than the five seconds that it has to end by itself
        attempt.end_other()
        assert attempt.failed.get(timeout=4) == ("rank 3 exited with 1", Exit.INTERRUPTED)


def test_a_host_whose_rank_is_lost_tells_the_others_before_it_ends(run: Run) -> None:
    heard = queue.SimpleQueue[tuple[str, float]]()
    attempt = _Attempt(run)
    with attempt.met(lambda why, grace: heard.put((why, grace))):
        attempt.end_other()
        assert heard.get(timeout=30) == (f"host {_SECOND} has ended", 5.0)
        assert attempt.failed.empty()
        attempt.may_fail.set()
        assert attempt.failed.get(timeout=30) == ("rank 3 exited with 1", Exit.FAILED)


def _call(port: int) -> None:
    while True:
        try:
            with socket.create_connection((_FIRST, port), 5) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                stranger.recv(1)
                return
        except ConnectionRefusedError:
            continue  # the first host does not listen yet
        except ConnectionResetError:
            return


def test_a_connection_that_breaks_is_a_lost_host() -> None:
    ours, theirs = socket.socketpair()
    said: list[str] = []
    heard = threading.Event()

    def tell(why: str, grace_seconds: float = 0.0) -> None:
        said.append(why)
        heard.set()

    _Meeting("", {"algo-2": ours}).watch(tell)
    theirs.close()
    assert heard.wait(30) and said == ["host algo-2 is lost"]
    ours.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the option")
def test_what_a_lost_host_does_not_acknowledge_is_repeated_no_longer_than_probes_are() -> None:
    with (
        socket.create_server((_FIRST, 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        _probe(connection)
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert found == 7000


def test_fails_in_one_sentence_if_a_host_is_lost_while_another_is_awaited() -> None:
    names = (_FIRST, _SECOND, "127.0.0.3")
    port = free_port()

    def told(own: str) -> None:
        hosts = Hosts(names=names, own=own, port=port, meeting_seconds=60)
        try:
            meet(hosts, {}, lambda: None)
        except InterruptedRunError as error:
            said.append(str(error))

    said = list[str]()
    first = threading.Thread(target=told, args=(_FIRST,))
    first.start()
    wait_for(lambda: can_connect(port))
    lost = socket.create_connection((_FIRST, port))
    lost.sendall(b'{"host": "127.0.0.2", "facts": {}}\n')
    lost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    lost.close()
    last = threading.Thread(target=told, args=("127.0.0.3",))
    last.start()
    for thread in (first, last):
        thread.join(60)
    assert f"host {_SECOND} was lost before all hosts had met" in said
    assert f"host {_FIRST} was lost before all hosts had met" in said


def can_connect(port: int) -> bool:
    with suppress(OSError), socket.create_connection((_FIRST, port), 1):
        return True
    return False


def test_fails_for_hosts_that_would_not_train_the_same() -> None:
    port = free_port()
    words = "host 127.0.0.2 has the ranks 4, and 127.0.0.1 2; give all hosts the same"
    with _joined({"ranks": 4}, port) as found, pytest.raises(UserError, match=words):
        meet(_on(0, port), {"ranks": 2}, lambda: None)
    assert [str(error) for error in found] == [words]


@pytest.mark.parametrize("leads", [True, False])
def test_fails_for_a_fact_that_only_one_host_has(leads: bool) -> None:
    port, own = free_port(), {"ranks": 1}
    first, second = (own, {**own, "source": 7})[:: 1 if leads else -1]
    with _joined(second, port) as found, pytest.raises(UserError, match="has the source ") as seen:
        meet(_on(0, port), first, lambda: None)
    assert [str(error) for error in found] == [str(seen.value)]


def test_fails_for_hosts_whose_configs_differ(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    def attempt(first: str, second: str) -> list[int | None]:
        listed = f"{_FIRST}:{free_port()},{_SECOND}"
        pairs = ((_FIRST, first), (_SECOND, second))
        return ended([run.fork(f"--hosts={n}@{listed}", f"--override={o}") for n, o in pairs])

    assert attempt("learning_rate=0.1", "learning_rate=0.2") == [2, 2]
    words = f"error: host {_SECOND} has the config field learning_rate 0.2, and {_FIRST} 0.1; give"
    assert capfd.readouterr().err.count(words) == 2
    assert attempt("loader_workers=0", "loader_workers=1") == [0, 0]


def test_fails_for_a_host_that_does_not_come() -> None:
    for number, missing in ((0, _SECOND), (1, _FIRST)):
        hosts = replace(_on(number, free_port()), meeting_seconds=0.0)
        with pytest.raises(AttemptEndedError, match=f"host {missing} did not come within 0 s"):
            meet(hosts, {}, lambda: None)


def test_a_notice_ends_the_wait_for_other_hosts() -> None:
    supervisor = Supervisor(budget_seconds=20)
    supervisor.interruption.record("shutdown")
    for number in (0, 1):
        with pytest.raises(InterruptedRunError, match="shutdown"):
            meet(_on(number, free_port()), {}, supervisor.wait_for_others)


def test_hosts_are_named_with_ones_own_first() -> None:
    assert Hosts.parse("b@a:70,b") == Hosts(names=("a", "b"), own="b", port=70)
    assert Hosts.parse("a@a,b") == Hosts(names=("a", "b"), own="a")
    assert Hosts.parse("a@a") is None
    for text in ("a,b", "c@a,b", "a@a,a", "a@a:x,b"):
        with pytest.raises(UserError, match="pass this machine's name and then all, each once"):
            Hosts.parse(text)
