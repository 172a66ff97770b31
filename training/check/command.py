"""The runs of `check`: one alone, one more, one interrupted everywhere; and what is said then."""

import argparse
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.attempt import run_attempt
from training.check.protocol import describe, problems
from training.check.small import Small
from training.config import Interval, parse_overrides, resolve_config
from training.dataset import open_dataset, write_manifest
from training.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, UserError
from training.exit_code import exit_code_of
from training.job import Options
from training.oversight import Oversight
from training.store import open_store
from training.torture.compare import Outcome, differences, read_outcome
from training.workload import Train
from training.workloads import load_workload

_EXIT_CRASHED = 70
_DATASET_SEED = 0
# Steps of a stage after which an attempt is ended: the first, one in an epoch, one before an
# evaluation, and one in the second epoch.
_STEPS = (0, 2, 3, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an attempt is interrupted."""

    stage: str
    kind: str  # step, evaluation or shard
    number: int

    def is_reached(self, stage: str, kind: str, number: int) -> bool:
        """Whether this place, or one behind it in the same stage, is reached."""
        return (stage, kind) == (self.stage, self.kind) and number >= self.number

    def __str__(self) -> str:
        what = "evaluation batch" if self.kind == "evaluation" else self.kind
        return f"stage {self.stage!r}, {what} {self.number + 1}"


class Runs:
    """Small runs of one workload below a folder, each attempt in a process of its own."""

    def __init__(self, name: str, recipe: str, overrides: dict[str, str], folder: Path) -> None:
        self._name = name
        self._recipe = recipe
        self._overrides = overrides
        self._folder = folder
        self._num_attempts = 0
        self.dataset = folder / "dataset"

    def whole(self, name: str) -> Outcome:
        """A run without any interruption."""
        code = self._attempt(name, None)
        if code != EXIT_FINISHED:
            raise UserError(f"a plain run of the workload ended with exit code {code}:{self.log}")
        return self.outcome(name)

    def interrupted(self, name: str, places: Sequence[Place]) -> tuple[Outcome, list[Place]]:
        """A run that is ended at each place in turn, then goes to its end; the places it met."""
        met = []
        for place in places:
            code = self._attempt(name, place)
            if code == EXIT_FINISHED:
                break
            if code != EXIT_INTERRUPTED:
                raise UserError(f"after {place} an attempt ended with exit code {code}:{self.log}")
            met.append(place)
        else:
            code = self._attempt(name, None)
        if code != EXIT_FINISHED:
            raise UserError(f"the last attempt ended with exit code {code}:{self.log}")
        return self.outcome(name), met

    def outcome(self, name: str) -> Outcome:
        """What a run left."""
        return read_outcome(open_store(str(self._folder / name)), self._folder / "scratch")

    @property
    def log(self) -> str:
        """The last lines of the last attempt."""
        path = self._folder / f"attempt-{self._num_attempts}.log"
        lines = path.read_text(errors="replace").splitlines()[-12:]
        return "".join(f"\n    {line}" for line in lines)

    def _attempt(self, name: str, place: Place | None) -> int:
        self._num_attempts += 1
        pid = os.fork()
        if pid == 0:
            os._exit(self._act(name, place))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _act(self, name: str, place: Place | None) -> int:
        """In the child: a machine of its own, which has nothing yet."""
        machine = self._folder / f"machine-{self._num_attempts}"
        with ExitStack() as stack:
            log = (self._folder / f"attempt-{self._num_attempts}.log").open("w")
            stack.enter_context(redirect_stdout(log))
            stack.enter_context(redirect_stderr(log))
            try:
                return exit_code_of(lambda: run_attempt(*self._options(name, place, machine)))
            except BaseException:  # the child must end here, whatever the workload raises
                traceback.print_exc()
                return _EXIT_CRASHED
            finally:
                log.flush()
                shutil.rmtree(machine, ignore_errors=True)

    def _options(self, name: str, place: Place | None, machine: Path) -> tuple[Options, Oversight]:
        oversight = Oversight(budget_seconds=600.0)

        def reached(stage: str, kind: str, number: int) -> None:
            if place is not None and place.is_reached(stage, kind, number):
                oversight.interruption.tell("notice")

        options = Options(
            workload=Small(load_workload(self._name), reached),
            workload_name=self._name,
            recipe=self._recipe,
            overrides=self._overrides,
            dataset_uri=str(self.dataset),
            store=open_store(str(self._folder / name)),
            run_id=name,
            interval=Interval(value=1, unit="epochs"),
            lease_ttl_seconds=10.0,
            metrics_file=None,
            writer=f"attempt-{self._num_attempts}",
            bundle_uri=None,
            scratch=machine,
        )
        return options, oversight


def check(options: argparse.Namespace) -> int:
    """Check as the command line asks; exit code 1: it does not resume exactly."""
    began = time.monotonic()
    workload = load_workload(options.name)
    wrong = problems(workload)
    if wrong:
        return _say_wrong(options, wrong)
    recipe = options.recipe or min(workload.recipes)
    overrides = parse_overrides(options.override)
    config = resolve_config(workload, recipe, overrides)
    _say(options, f"[ok] protocol: {describe(workload)}")
    # torch's optimizers import it when the first one is made: 3 s that no attempt need repeat.
    import torch
    import torch._dynamo

    torch.set_num_threads(config.num_threads)
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        runs = Runs(options.name, recipe, overrides, Path(folder))
        _prepare_dataset(options, workload, runs)
        whole = runs.whole("whole")
        _say(options, f"[ok] a run alone: {len(whole.steps)} steps")
        differing = differences(runs.whole("again"), whole)
        if differing:
            return _end(options, began, "two runs without interruption differ", differing, [])
        _say(options, "[ok] once more: the same weights, losses and sample ids")
        ours, met = runs.interrupted("interrupted", _places(workload.stages(config)))
        differing = differences(ours, whole)
        return _end(options, began, "the interrupted run differs", differing, met)


def _places(stages: Sequence[Any]) -> list[Place]:
    places = []
    for stage in stages:
        if not isinstance(stage, Train):
            places.append(Place(stage=stage.name, kind="shard", number=stage.num_shards // 2))
            continue
        first, *rest = (Place(stage=stage.name, kind="step", number=step) for step in _STEPS)
        evaluation = Place(stage=stage.name, kind="evaluation", number=0)
        places += [first, *rest[:-1], evaluation, rest[-1]]
    return places


def _prepare_dataset(options: argparse.Namespace, workload: Any, runs: Runs) -> None:
    if options.dataset_uri is not None:
        runs.dataset = Path(options.dataset_uri)
        open_dataset(runs.dataset)
        return
    runs.dataset.mkdir()
    meta = workload.make_dataset(
        runs.dataset, options.count, _DATASET_SEED, lambda done, total: None
    )
    write_manifest(runs.dataset, workload.name, meta)


def _say_wrong(options: argparse.Namespace, wrong: Sequence[str]) -> int:
    if options.json:
        print(json.dumps({"resumes_exactly": False, "problems": list(wrong)}, indent=1))
    for sentence in [] if options.json else wrong:
        print(f"[failed] {sentence}")
    return EXIT_FAILED


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(line, flush=True)


def _end(
    options: argparse.Namespace,
    began: float,
    what: str,
    differing: Sequence[str],
    met: Sequence[Place],
) -> int:
    seconds = time.monotonic() - began
    if options.json:
        record = {
            "resumes_exactly": not differing,
            "problems": [f"{what}: {sentence}" for sentence in differing],
            "interruptions": [str(place) for place in met],
            "seconds": round(seconds, 1),
        }
        print(json.dumps(record, indent=1))
        return EXIT_FAILED if differing else EXIT_FINISHED
    for place in met:
        print(f"  interrupted at {place}")
    for sentence in differing:
        print(f"[failed] {what}: {sentence}")
    if not differing:
        print(
            f"[ok] {options.name} resumes exactly: {len(met)} interruptions, each on a new "
            f"machine, and the same weights, losses and sample ids ({seconds:.0f} s)"
        )
    return EXIT_FAILED if differing else EXIT_FINISHED
