"""One attempt of a tortured run, in a forked child or in a fresh interpreter.

The fresh one is `python -m training.torture.attempt ATTEMPT.json`, called by nobody but scene.py.
"""

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from training.attempt import run_attempt
from training.config import parse_interval
from training.exit_code import exit_code_of
from training.job import Options
from training.oversight import Oversight
from training.store import open_store
from training.torture.faults import misbehaving
from training.torture.plan import Trouble
from training.torture.watch import Board, Watch
from training.torture.watched import watched
from training.workloads import load_workload

EXIT_CRASHED = 70


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What one attempt is started with."""

    workload: str
    recipe: str
    overrides: Mapping[str, str]
    dataset: str
    run_uri: str
    interval: str
    ttl_seconds: float
    budget_seconds: float
    folder: str  # of this attempt: board, log, scratch
    writer: str
    most_seconds: float  # then the attempt hangs: stacks are written and it ends
    trouble: Trouble | None = None
    fault_rate: float = 0.0
    fault_seed: int = 0

    @property
    def board(self) -> Board:
        """Where the attempt says what it is doing."""
        return Board(Path(self.folder) / "board")

    @property
    def log(self) -> Path:
        """What the attempt printed."""
        return Path(self.folder) / "log"


def act(asked: Asked) -> int:
    """Run the attempt in this process, its output in its log; return the exit code."""
    with asked.log.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(asked.most_seconds, exit=True)
    try:
        return exit_code_of(lambda: _run(asked))
    except BaseException:  # whatever it is, the parent must hear of it and not run on as a child
        traceback.print_exc()
        return EXIT_CRASHED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def fork(asked: Asked) -> int:
    """Run the attempt in a forked child; return its process id."""
    pid = os.fork()
    if pid == 0:
        os._exit(act(asked))  # the parent's own clean-up is none of the child's business
    return pid


def spawn(asked: Asked) -> int:
    """Run the attempt in a new interpreter; return its process id."""
    path = Path(asked.folder) / "attempt.json"
    path.write_text(json.dumps(asdict(asked)))
    command = [sys.executable, "-m", "training.torture.attempt", str(path)]
    return os.posix_spawn(sys.executable, command, os.environ)


def _run(asked: Asked) -> int:
    watch = Watch(asked.board, asked.trouble)
    # A hang is seen by the parent here, which has it that `most_seconds` ends the attempt.
    oversight = Oversight(budget_seconds=asked.budget_seconds)
    oversight.begin()
    store = open_store(asked.run_uri)
    options = Options(
        workload=watched(load_workload(asked.workload), watch),
        workload_name=asked.workload,
        recipe=asked.recipe,
        overrides=asked.overrides,
        dataset_uri=asked.dataset,
        store=misbehaving(store, watch, asked.fault_rate, asked.fault_seed),
        run_id=asked.run_uri.rpartition("/")[2],
        interval=parse_interval(asked.interval),
        lease_ttl_seconds=asked.ttl_seconds,
        metrics_file=None,
        writer=asked.writer,
        bundle_uri=None,
        scratch=Path(asked.folder) / "scratch",
    )
    return run_attempt(options, oversight)


def _asked(record: dict[str, Any]) -> Asked:
    asked = Asked(**record)
    return replace(asked, trouble=Trouble(**record["trouble"])) if record["trouble"] else asked


if __name__ == "__main__":
    os._exit(act(_asked(json.loads(Path(sys.argv[1]).read_text()))))
