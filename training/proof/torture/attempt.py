"""One attempt of a tortured run, in a forked child or in a fresh interpreter, with all its ranks.

The fresh one is `python -m training.proof.torture.attempt ATTEMPT.json`; only `spawn` calls it.
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
from training.checkpoint.memory import data_bytes
from training.engine.attempt import run_attempt
from training.engine.exit_code import exit_code_of
from training.engine.job import RunOptions, resolve_job
from training.interruption.supervisor import Supervisor
from training.proof.torture.choice import Saving
from training.proof.torture.faults import misbehaving
from training.proof.torture.plan import Trouble
from training.proof.torture.ranks import ForkedRanks, read_place
from training.proof.torture.watch import NOTICE_FILE, Board, Watch
from training.proof.torture.watched import watched
from training.ranks.launch import RankProcess, StartRank, end_with_rank_0
from training.ranks.world import RankEnvironment
from training.report.log import configure_logging
from training.store.open import open_store
from training.workloads import load_workload

EXIT_CRASHED = 70
# Enough for a small run; less than what a copy on the host must leave free.
_STREAMING_BYTES = 400 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRequest:
    """What one attempt is started with."""

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
    folder: str  # of this attempt: boards, logs, scratch
    writer: str
    most_seconds: float  # then the attempt hangs: stacks are written and it ends
    trouble: Trouble | None = None
    fault_rate: float = 0.0
    fault_seed: int = 0

    @property
    def boards(self) -> list[Board]:
        """Where the attempt's ranks say what they are doing."""
        folder = Path(self.folder)
        return [Board(folder / f"board-{rank}") for rank in range(self.num_processes)]

    def log(self, rank: int = 0) -> Path:
        """What a rank printed."""
        return Path(self.folder) / (f"log-{rank}" if rank else "log")


def act(asked: AttemptRequest, rank: int, start_rank: StartRank | None) -> int:
    """Run a rank in this process, its output in its log; return the exit code."""
    with asked.log(rank).open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    configure_logging()
    faulthandler.dump_traceback_later(asked.most_seconds, exit=True)
    try:
        return exit_code_of(lambda: _run(asked, rank, start_rank))
    except BaseException:  # whatever it is, the parent must hear of it and not run on as a child
        traceback.print_exc()
        return EXIT_CRASHED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def fork(asked: AttemptRequest) -> int:
    """Run the attempt in a forked child, which leads a process group; return its process id."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        ranks = ForkedRanks(asked.num_processes, lambda rank: act(asked, rank, None))
        os._exit(
            act(asked, 0, ranks.start)
        )  # the parent's clean-up is none of the child's business
    with suppress(OSError):  # whoever comes first; it may have ended
        os.setpgid(pid, pid)
    return pid


def spawn(asked: AttemptRequest) -> int:
    """Run the attempt in a new interpreter, which leads a process group; return its process id."""
    path = Path(asked.folder) / "attempt.json"
    path.write_text(json.dumps(asdict(asked)))
    return os.posix_spawn(sys.executable, _command(path), os.environ, setpgroup=0)


def _command(path: Path) -> list[str]:
    return [sys.executable, "-m", "training.proof.torture.attempt", str(path)]


def _start_interpreter(path: Path, variables: Mapping[str, str]) -> RankProcess:
    environment = {**os.environ, **variables}
    return subprocess.Popen(_command(path), env=environment, stdin=subprocess.PIPE)


def _run(asked: AttemptRequest, rank: int, start_rank: StartRank | None) -> int:
    boards = asked.boards
    boards[rank].begin(os.getpid())
    # A hang is seen by the parent here, which has it that `most_seconds` ends the attempt.
    supervisor = Supervisor(
        budget_seconds=asked.budget_seconds, notice_file=Path(asked.folder) / NOTICE_FILE
    )
    watch = Watch(boards, rank, asked.trouble, lambda: supervisor.extra_time.is_granted)
    supervisor.begin()
    place = RankEnvironment.from_environment(os.environ)
    if rank and not place.rank:
        place = RankEnvironment.from_environment(read_place())
        if not place.rank:
            return 0  # rank 0 has ended without the others
    if rank:
        end_with_rank_0()
    if asked.saving == "streamed":
        _limit_memory()
    store = open_store(asked.run_uri)
    options = RunOptions(
        workload=asked.workload,
        recipe=asked.recipe,
        overrides=asked.overrides,
        dataset_uri=asked.dataset,
        store=misbehaving(store, watch, asked.fault_rate, asked.fault_seed + rank),
        run_id=asked.run_uri.rpartition("/")[2],
        interval=parse_interval(asked.interval),
        lease_ttl_seconds=asked.ttl_seconds,
        writer=asked.writer,
        scratch=Path(asked.folder) / "scratch",
        environment=place,
        num_processes=asked.num_processes,
        start_rank=start_rank,
    )
    job = resolve_job(options, watched(load_workload(asked.workload), watch))
    return run_attempt(options, job, supervisor)


def _limit_memory() -> None:
    """Let this process have as little memory as a host that cannot hold a copy of the state."""
    used = data_bytes()
    if used is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (used + _STREAMING_BYTES, hard))


def _asked(record: dict[str, Any]) -> AttemptRequest:
    asked = AttemptRequest(**record)
    return replace(asked, trouble=Trouble(**record["trouble"])) if record["trouble"] else asked


if __name__ == "__main__":
    _path = Path(sys.argv[1])
    _rank = RankEnvironment.from_environment(os.environ).rank
    os._exit(act(_asked(json.loads(_path.read_text())), _rank, partial(_start_interpreter, _path)))
