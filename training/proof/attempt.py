"""One attempt with all its ranks, in a forked child or in a new interpreter.

The new interpreter runs `python -m training.proof.attempt ATTEMPT.json`, called by `spawn`.

A workload's stages behind proxies: they report their phases, and may be shortened.

Shortened stages see only the first samples, for a few epochs with an odd last batch; what the loop
relies on is checked on the way.
"""

import faulthandler
import json
import math
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

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from contract.errors import UserError
from contract.grammar import parse_interval
from training import (
    Batch,
    Inputs,
    Loss,
    Order,
    Partial,
    Prepare,
    PrepareProxy,
    ResolvedWorkload,
    Restaged,
    RunOptions,
    Samples,
    Settings,
    Start,
    Train,
    TrainProxy,
    Workload,
    checked_order,
    load_workload,
    run_workload,
    samples_of,
)
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
from training.proof.injector import NOTICE_FILE, Injector, Kill, StatusFile, misbehaving

_NUM_EPOCHS = 2
_FULL_STEPS = 3
_STEPS_PER_EPOCH = _FULL_STEPS + 1
# A stage measured in steps ends here, in the last epoch of a stage measured in epochs.
_MID_EPOCH = _NUM_EPOCHS * _STEPS_PER_EPOCH - 1


def observed(workload: Workload[Any], injector: Injector) -> Workload[Any]:
    """Return the workload, reporting the phases of its stages to the injector."""

    def proxy(stage: Prepare | Train) -> Prepare | Train:
        if isinstance(stage, Train):
            return _ObservedTrain(stage, injector)
        return _ObservedPrepare(stage, injector)

    return Restaged(workload, lambda c: [proxy(stage) for stage in workload.stages(c)])


def shortened(workload: Workload[Any], num_steps: int | None = None) -> Workload[Any]:
    """Return the workload with its stages shortened to two epochs each.

    A stage measured in steps gets all but the last step of these; all get what `num_steps` needs.
    """

    def proxy(stage: Prepare | Train) -> Prepare | Train:
        return _ShortenedTrain(stage, num_steps) if isinstance(stage, Train) else stage

    return Restaged(workload, lambda c: [proxy(stage) for stage in workload.stages(c)])


class _ObservedPrepare(PrepareProxy):
    def __init__(self, inner: Prepare, injector: Injector) -> None:
        super().__init__(inner)
        self._injector = injector

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        with self._injector.doing("preparation", self.name, shard + 1):
            return super().make(i, shard)


class _ObservedTrain(TrainProxy):
    def __init__(self, inner: Train, injector: Injector) -> None:
        super().__init__(inner)
        self._injector = injector
        self._num_batches = 0

    def start(self, m: nn.Module, i: Inputs) -> Start:
        with self._injector.doing("start of a stage", self.name):
            return super().start(m, i)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        with self._injector.doing("step", self.name, step + 1):
            return super().loss(m, b, step, num_steps)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        self._num_batches += 1
        with self._injector.doing("evaluation", self.name, self._num_batches):
            return super().evaluate(m, b)


class _ShortenedTrain(TrainProxy):
    def __init__(self, inner: Train, num_steps: int | None) -> None:
        super().__init__(inner)
        self._num_steps = num_steps

    @property
    def settings(self) -> Settings:
        own = self._inner.settings
        if own.evaluate_every_steps:
            own = replace(own, evaluate_every_steps=min(own.evaluate_every_steps, _FULL_STEPS))
        if own.steps is not None:
            return replace(own, steps=self._num_steps or min(own.steps, _MID_EPOCH))
        if self._num_steps is not None:
            return replace(own, epochs=math.ceil(self._num_steps / _STEPS_PER_EPOCH))
        return replace(own, epochs=min(own.epochs or 1, _NUM_EPOCHS))

    def samples(self, i: Inputs, split: str) -> Samples:
        # Checked here, as the loop's checks would see only the proxy.
        inner = samples_of(self._inner, i, split)
        count = min(len(inner), _num_samples(self.settings)) if split == "train" else len(inner)
        return _FewSamples(inner, count, f"stage {self.name!r}, split {split!r}")


def _num_samples(settings: Settings) -> int:
    """Return the samples for three full steps and an odd one per epoch, without a batch of one."""
    if settings.global_batch > settings.micro_batch:
        return _FULL_STEPS * settings.global_batch + settings.micro_batch
    return _FULL_STEPS * settings.global_batch + max(2, settings.global_batch // 2)


@dataclass(frozen=True, slots=True)
class _FewSamples(Samples):
    """The first samples of a set, with checks of what the loop relies on."""

    inner: Samples
    count: int
    what: str

    def __len__(self) -> int:
        return self.count

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        state = rng.get_state()
        item = self.inner.get(index, epoch, rng)
        if index < 2:  # two are enough to find samples that are not a function of the generator
            again = self.inner.get(index, epoch, _generator(state))
            if not _equal(item, again):
                raise UserError(
                    f"{self.what}: get({index}, rng) returns different samples for the same state "
                    "of rng. Code that draws from the generators of torch, numpy or random, like "
                    "torchvision's transforms, goes below `with drawing_from(rng):` (from training "
                    "import drawing_from), or the dataset into a training.DatasetSamples"
                )
        return item

    def order(self, epoch: int, seed: int) -> Order:
        order = checked_order(self.inner, epoch, seed, twice=True)
        return order[order < self.count]


# The inner methods themselves: the loop and the loader check whether the samples have their own.
setattr(_FewSamples, "collate", property(lambda few: few.inner.collate))  # noqa: B010
setattr(_FewSamples, "files", property(lambda few: few.inner.files))  # noqa: B010


def _generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _equal(a: Any, b: Any) -> bool:
    (leaves_a, spec_a), (leaves_b, spec_b) = tree_flatten(a), tree_flatten(b)
    if spec_a != spec_b:
        return False
    pairs = zip(leaves_a, leaves_b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else bool(x == y) for x, y in pairs)


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
