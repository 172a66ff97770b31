"""One attempt of a tortured run with all its ranks, in a forked child or in a new interpreter.

The new interpreter runs `python -m training.proof.torture.attempt ATTEMPT.json`, called by `spawn`.
"""

import faulthandler
import json
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from contract.grammar import parse_interval
from training.attempt.exit_code import exit_code_of
from training.attempt.launch import RankProcess, StartRank
from training.attempt.supervisor import Supervisor
from training.attempt.world import RankEnvironment
from training.engine.attempt import run_workload
from training.engine.job import RunOptions, resolve_workload
from training.proof.torture.faults import misbehaving
from training.proof.torture.injector import NOTICE_FILE, Injector, StatusFile
from training.proof.torture.instrumented import instrumented
from training.proof.torture.plan import Kill
from training.proof.torture.ranks import ForkedRanks, place_of
from training.proof.torture.variants import Saving
from training.registry import load_workload
from training.report.log import configure_logging
from training.save.memory import data_bytes
from training.store.open import open_store

EXIT_CRASHED = 70
# Enough for a small run, but less than what a copy on the host must leave free.
_STREAMING_BYTES = 400 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRequest:
    """The arguments of one attempt."""

    workload: str
    recipe: str
    overrides: Mapping[str, str]
    dataset: str
    run_uri: str
    num_processes: int
    interval: str
    saving: Saving
    ttl_seconds: float
    budget_seconds: float
    folder: str  # of this attempt: statuses, logs, scratch
    writer: str
    most_seconds: float  # then the attempt counts as hung: it prints its stacks and exits
    kill: Kill | None = None
    fault_rate: float = 0.0
    fault_seed: int = 0

    @property
    def statuses(self) -> list[StatusFile]:
        """The status files of the attempt's ranks."""
        folder = Path(self.folder)
        return [StatusFile(folder / f"status-{rank}") for rank in range(self.num_processes)]

    def log(self, rank: int = 0) -> Path:
        """The file with a rank's output."""
        return Path(self.folder) / (f"log-{rank}" if rank else "log")


def act(request: AttemptRequest, rank: int, start_rank: StartRank | None) -> int:
    """Run a rank in this process, its output in its log; return the exit code."""
    with request.log(rank).open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    configure_logging()
    faulthandler.dump_traceback_later(request.most_seconds, exit=True)
    try:
        return exit_code_of(lambda: _run(request, rank, start_rank))
    except BaseException:  # anything: the child must exit here and tell the parent
        traceback.print_exc()
        return EXIT_CRASHED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def fork(request: AttemptRequest) -> int:
    """Run the attempt in a forked child, which leads a process group; return its process id."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        ranks = ForkedRanks(request.num_processes, lambda rank: act(request, rank, None))
        os._exit(act(request, 0, ranks.start))  # skips the parent's clean-up handlers
    with suppress(OSError):  # both set it, so that neither must wait; the child may have exited
        os.setpgid(pid, pid)
    return pid


def spawn(request: AttemptRequest) -> int:
    """Run the attempt in a new interpreter, which leads a process group; return its process id."""
    path = Path(request.folder) / "attempt.json"
    path.write_text(json.dumps(asdict(request)))
    return os.posix_spawn(sys.executable, _command(path), os.environ, setpgroup=0)


def _command(path: Path) -> list[str]:
    return [sys.executable, "-m", "training.proof.torture.attempt", str(path)]


def _start_interpreter(path: Path, variables: Mapping[str, str]) -> RankProcess:
    environment = {**os.environ, **variables}
    return subprocess.Popen(_command(path), env=environment, stdin=subprocess.PIPE)


def _run(request: AttemptRequest, rank: int, start_rank: StartRank | None) -> int:
    statuses = request.statuses
    statuses[rank].begin(os.getpid())
    # No watchdog: `most_seconds` ends an attempt that hangs.
    supervisor = Supervisor(
        budget_seconds=request.budget_seconds, notice_file=Path(request.folder) / NOTICE_FILE
    )
    injector = Injector(statuses, rank, request.kill, lambda: supervisor.extra_time.is_granted)
    supervisor.begin()
    place = place_of(rank)
    if place is None:
        return 0
    if request.saving == "streamed":
        _limit_memory()
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
        scratch=Path(request.folder) / "scratch",
        environment=place,
        num_processes=request.num_processes,
        start_rank=start_rank,
    )
    workload = instrumented(load_workload(request.workload), injector)
    return run_workload(options, resolve_workload(options, workload), supervisor)


def _limit_memory() -> None:
    """Limit memory as on a host that cannot hold a copy of the state."""
    used = data_bytes()
    if used is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (used + _STREAMING_BYTES, hard))


def _request_from(record: dict[str, Any]) -> AttemptRequest:
    request = AttemptRequest(**record)
    return replace(request, kill=Kill(**record["kill"])) if record["kill"] else request


if __name__ == "__main__":
    _path = Path(sys.argv[1])
    _rank = RankEnvironment.from_environment(os.environ).rank
    os._exit(
        act(_request_from(json.loads(_path.read_text())), _rank, partial(_start_interpreter, _path))
    )
