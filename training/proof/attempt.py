"""One attempt with all its ranks, in a forked child or in a new interpreter.

The new interpreter runs `python -m training.proof.attempt ATTEMPT.json`, called by `spawn`.
"""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

from contract.grammar import parse_interval
from training import ResolvedWorkload, RunOptions, load_workload, run_workload
from training.durable import (
    Checkpointer,
    Hosts,
    RankEnvironment,
    StartRank,
    Supervisor,
    configure_logging,
    exit_code_of,
    open_store,
)
from training.proof.injector import NOTICE_FILE, Injector, Kill, StatusFile
from training.proof.stages import observed, shortened
from training.proof.store_faults import misbehaving

EXIT_CRASHED = 70
# streamed: as on a host without memory for a copy of the state.
Saving: TypeAlias = Literal["staged", "streamed"]
_POLL_SECONDS = 0.005
# How long hosts wait for one that was killed before they met; it is not restarted.
_MEETING_SECONDS = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRequest:
    """The arguments of one attempt."""

    workload: str
    recipe: str
    overrides: Mapping[str, str]
    dataset: str
    interval: str
    ttl_seconds: float
    budget_seconds: float
    run_uri: str = ""
    folder: str = ""  # of this attempt: statuses, logs, scratch
    writer: str = ""
    num_processes: int = 1  # ranks in total
    num_hosts: int = 1  # each with the same number of ranks
    port: int = 0  # where several meet
    saving: Saving = "staged"
    most_seconds: float | None = None  # after which it prints its stacks and exits, as hung
    is_short: bool = False  # few steps in each stage, at least `num_steps`
    num_steps: int | None = None
    kills: tuple[Kill, ...] = ()
    fault_rate: float = 0.0
    fault_seed: int = 0

    @property
    def num_here(self) -> int:
        """The number of ranks of one host."""
        return self.num_processes // self.num_hosts

    def hosts(self, rank: int) -> Hosts | None:
        """Return the hosts as the first rank of one of them names them; None for a single host."""
        if self.num_hosts == 1:
            return None
        names = ("127.0.0.1", *(f"host-{number}" for number in range(1, self.num_hosts)))
        return Hosts(
            names=names,
            own=names[rank // self.num_here],
            port=self.port,
            meeting_seconds=_MEETING_SECONDS,
        )

    @property
    def statuses(self) -> list[StatusFile]:
        """The status files of the attempt's ranks."""
        folder = Path(self.folder)
        return [StatusFile(folder / f"status-{rank}") for rank in range(self.num_processes)]

    def log(self, rank: int = 0) -> Path:
        """The file with a rank's output."""
        return Path(self.folder) / (f"log-{rank}" if rank else "log")


def _act(request: AttemptRequest, rank: int, start_rank: StartRank | None) -> int:
    """Run a rank in this process, its output in its log; return the exit code."""
    log = request.log(rank).open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    configure_logging()
    if request.most_seconds is not None:
        faulthandler.dump_traceback_later(request.most_seconds, exit=True)
    try:
        return exit_code_of(lambda: _run(request, rank, start_rank))
    except BaseException:  # anything: the child must exit here and tell the parent
        traceback.print_exc()
        return EXIT_CRASHED
    finally:
        log.flush()


def _with_port(request: AttemptRequest) -> AttemptRequest:
    """Return the request, with a free port if hosts are to meet."""
    if request.num_hosts == 1:
        return request
    with socket.create_server(("", 0)) as free:
        return replace(request, port=free.getsockname()[1])


def fork(request: AttemptRequest) -> int:
    """Run the attempt in a forked child, which leads a process group; return its process id."""
    request = _with_port(request)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        first = 0
        for other in range(request.num_here, request.num_processes, request.num_here):
            if os.fork() == 0:  # another host, in the same process group
                first = other
                break
        own = range(first + 1, first + request.num_here)
        ranks = _ForkedRanks(own, lambda rank: _act(request, rank, None))
        os._exit(_act(request, first, ranks.start))  # skips the parent's clean-up handlers
    with suppress(OSError):  # both set it, so that neither must wait; the child may have exited
        os.setpgid(pid, pid)
    return pid


def spawn(request: AttemptRequest) -> int:
    """Run the attempt in a new interpreter, which leads a process group; return its process id."""
    path = Path(request.folder) / "attempt.json"
    path.write_text(json.dumps(asdict(_with_port(request))))
    return os.posix_spawn(sys.executable, _command(path), os.environ, setpgroup=0)


def _command(path: Path) -> list[str]:
    return [sys.executable, "-m", "training.proof.attempt", str(path)]


def _start_interpreter(path: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **variables}
    return subprocess.Popen(_command(path), env=environment, stdin=subprocess.PIPE)


def _run(request: AttemptRequest, rank: int, start_rank: StartRank | None) -> int:
    statuses = request.statuses
    statuses[rank].begin(os.getpid())
    # No watchdog: `most_seconds` ends an attempt that hangs.
    supervisor = Supervisor(
        budget_seconds=request.budget_seconds, notice_file=Path(request.folder) / NOTICE_FILE
    )
    injector = Injector(
        statuses,
        rank,
        request.kills,
        is_in_extra_time=lambda: supervisor.extra_time.is_granted,
        is_noticed=lambda: supervisor.interruption.notice is not None,
    )
    supervisor.begin()
    place = _place_of(request, rank)
    if place is None:
        return 0
    if request.saving == "streamed":
        Checkpointer.stream_all()
    store = open_store(request.run_uri)
    options = RunOptions(
        workload=request.workload,
        recipe=request.recipe,
        overrides=request.overrides,
        dataset_uri=request.dataset,
        store=misbehaving(store, injector, request.fault_rate, request.fault_seed + rank),
        run_id=request.run_uri.rpartition("/")[2],
        interval=parse_interval(request.interval),
        lease_ttl_seconds=request.ttl_seconds,
        writer=request.writer,
        scratch=Path(request.folder) / "scratch" / f"host-{rank // request.num_here}",
        environment=place,
        num_processes=request.num_here,
        start_rank=start_rank,
    )
    workload = load_workload(request.workload)
    if request.is_short:
        workload = shortened(workload, request.num_steps)
    resolved = ResolvedWorkload.of(observed(workload, injector), request.recipe, request.overrides)
    return run_workload(options, resolved, supervisor)


class _ForkedRanks:
    """A host's other ranks, forked from its first rank's process while that has one thread.

    For the engine they replace the ranks of its own launcher (durable/attempt/ranks.py), but start
    seconds sooner: a rank waits at its pipe for its environment, and exits when the pipe closes, as
    the first rank has then exited.
    """

    def __init__(self, ranks: Iterable[int], act: Callable[[int], int]) -> None:
        self._ranks: dict[int, _ForkedRank] = {}
        for rank in ranks:
            self._ranks[rank] = _ForkedRank(rank, act, self._ranks.values())

    def start(self, variables: Mapping[str, str]) -> "_ForkedRank":
        """Release the rank that these variables are for."""
        process = self._ranks[int(variables["RANK"])]
        # It may have been killed already, which `wait` will report.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(dict(variables)).encode() + b"\n")
        return process


class _ForkedRank:
    def __init__(
        self, rank: int, act: Callable[[int], int], before: "Iterable[_ForkedRank]"
    ) -> None:
        reader, writer = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(writer, "wb", buffering=0)
        self.pid = os.fork()
        if self.pid == 0:
            for other in (*before, self):
                other.stdin.close()  # or that rank would not see it close
            os.dup2(reader, 0)
            sys.stdin = os.fdopen(0)
            os._exit(act(rank))
        os.close(reader)
        self._code: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; TimeoutExpired after `timeout` seconds. Any thread may call it."""
        began = time.monotonic()
        while (code := self._poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal; no-op once the process has exited."""
        if self._poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(9)

    def _poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code


def _place_of(request: AttemptRequest, rank: int) -> RankEnvironment | None:
    """Return how this rank meets the others; None if its host's first rank has exited."""
    if rank % request.num_here == 0:
        return RankEnvironment.from_environment(os.environ, request.hosts(rank))
    place = RankEnvironment.from_environment(os.environ)
    if not place.rank:
        place = RankEnvironment.from_environment(_read_place())
        if not place.rank:
            return None
    Supervisor.end_with_rank_0()
    return place


def _read_place() -> dict[str, str]:
    """In a forked rank, wait for the variables of `start`; return none if they will not come."""
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(0, 1)  # not a byte more: the rest of the pipe is for `end_with_rank_0`
        if not read:
            return {}
        line += read
    variables: dict[str, str] = json.loads(line)
    return variables


if __name__ == "__main__":
    _path = Path(sys.argv[1])
    _record: dict[str, Any] = json.loads(_path.read_text())
    _kills = tuple(Kill(**kill) for kill in _record["kills"])
    _request = AttemptRequest(**{**_record, "kills": _kills})
    _rank = RankEnvironment.from_environment(os.environ).rank
    if len(sys.argv) > 2:  # the first one of another host
        _rank = int(sys.argv[2])
    elif _rank == 0:
        for _first in range(_request.num_here, _request.num_processes, _request.num_here):
            subprocess.Popen([*_command(_path), str(_first)], stdin=subprocess.DEVNULL)
    os._exit(_act(_request, _rank, partial(_start_interpreter, _path)))
