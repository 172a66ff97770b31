"""The command `check`: an uninterrupted run, another one, and one interrupted everywhere."""

import argparse
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.errors import Exit, UserError
from contract.grammar import parse_interval
from training import ResolvedWorkload, Train, load_workload, parse_overrides, problems
from training.durable import Head, Store
from training.proof.attempt import AttemptRequest
from training.proof.experiment import (
    AttemptResult,
    Experiment,
    RunOutcome,
    Runs,
    differences,
    made_dataset,
    refuse_started_cuda,
)
from training.proof.injector import Kill

# The next attempt waits this long after a kill. It may be short, as no two attempts run at once.
_LEASE_TTL_SECONDS = 2.0
_NOTICE_SECONDS = 600.0
# Steps of a stage in which an attempt gets a notice: the first, one within an epoch, one before an
# evaluation, and one in the second epoch.
_NOTICES = (1, 3, 4, 6)
# Shares of a longer stage's steps after which an attempt is killed: the next one resumes from a
# periodic checkpoint.
_KILLS = (0.45, 0.9)
_UNITS = {"step": "step", "evaluation": "evaluation batch", "preparation": "shard"}
_LOG_LINES = 12


def check(options: argparse.Namespace) -> int:
    """Run the checks; exit code 1: the workload does not resume exactly."""
    began = time.monotonic()
    workload = load_workload(options.name)
    found = problems(workload)
    if found:
        return _end(options, began, found, [])
    recipe = options.recipe or next(iter(workload.recipes))
    overrides = parse_overrides(options.override)
    stages = ResolvedWorkload.of(workload, recipe, overrides).stages
    parse_interval(options.checkpoint_interval)
    kinds = ", ".join(f"{'train' if isinstance(s, Train) else 'prepare'} {s.name}" for s in stages)
    recipes = ", ".join(sorted(workload.recipes))
    _print(options, f"[ok] protocol: recipes {recipes}; stages of {recipe}: {kinds}")
    # torch imports it with the first optimizer: 3 s that the forked attempts need not repeat.
    import torch
    import torch._dynamo

    # A pool of OpenMP threads does not survive a fork: the next parallel loop would wait forever.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="check-") as name:
        folder = Path(name)
        request = AttemptRequest(
            workload=options.name,
            recipe=recipe,
            overrides=overrides,
            dataset=str(
                made_dataset(options.dataset_uri, workload, options.count, folder / "dataset")
            ),
            interval=options.checkpoint_interval,
            ttl_seconds=_LEASE_TTL_SECONDS,
            budget_seconds=_NOTICE_SECONDS,
            num_processes=options.num_processes,
            is_short=True,
            num_steps=options.steps,
        )
        refuse_started_cuda(options.name)
        runs = Runs(request=request, uri=name, out=folder)
        whole = _whole(runs, "whole")
        stage, fewest = _fewest_steps(whole)
        if fewest < (options.steps or 0):
            raise UserError(
                f"stage {stage!r} has so few samples that it took {fewest} steps, not "
                f"{options.steps}; pass a larger --count, or set a smaller batch with --override"
            )
        _print(options, f"[ok] uninterrupted run: {len(whole.steps)} steps")
        differing = differences(_whole(runs, "again"), whole)
        if differing:
            found = [f"two runs without interruption differ: {text}" for text in differing]
            return _end(options, began, found, [])
        _print(options, "[ok] repeated run: the same weights, losses and sample ids")
        planned = _plan(stages, options.steps)
        ours, reached = _interrupted(runs, "interrupted", planned)
        found = [
            *(f"the interrupted run differs: {text}" for text in differences(ours, whole)),
            *_never_interrupted(planned, reached),
        ]
        return _end(options, began, found, list(reached.values()))


def _plan(stages: Sequence[Any], num_steps: int | None) -> list[Kill]:
    """Return where to interrupt a run, by stage; `num_steps` adds kills to Train stages."""
    planned = []
    for stage in stages:
        if not isinstance(stage, Train):
            # A notice during the last shard of the run finds nothing left to interrupt.
            if stage.num_shards > 1 or stage is not stages[-1]:
                planned.append(_notice(stage, "preparation", stage.num_shards // 2 + 1))
            continue
        *first, last = (_notice(stage, "step", step) for step in _NOTICES)
        planned += [*first, _notice(stage, "evaluation", 1), last]
        for share in _KILLS if num_steps else ():
            step = int(share * (num_steps or 0)) + 1
            planned.append(Kill(kind="kill", stage=stage.name, phase="step", occurrence=step))
    return planned


def _notice(stage: Any, phase: str, number: int) -> Kill:
    # Whichever rank gets there first: not every rank makes a given shard.
    return Kill(kind="notice", stage=stage.name, phase=phase, occurrence=number, observed_rank=None)


def _whole(runs: Runs, name: str) -> RunOutcome:
    """Make an uninterrupted run."""
    (result,) = runs.attempt(name, Experiment())
    if result.code != Exit.FINISHED:
        raise UserError(f"a plain run of the workload {_ended(result)}")
    return runs.outcome(name)


def _interrupted(
    runs: Runs, name: str, planned: Sequence[Kill]
) -> tuple[RunOutcome, dict[Kill, str]]:
    """Make a run whose attempts each end at the first kill that is left; describe those.

    A point that does not exist (a second epoch where there is one) does not hold up the rest.
    """
    left, reached = list(planned), dict[Kill, str]()
    while True:
        (result,) = runs.attempt(name, Experiment(kills=tuple(left)))
        if result.code == Exit.FINISHED:
            return runs.outcome(name), reached
        kill = result.kill
        if kill is None:
            raise UserError(f"the last attempt {_ended(result)}")
        is_killed = kill.kind == "kill"
        where = f"stage {kill.stage!r}, {_UNITS[kill.phase or '']} {kill.occurrence}"
        how = f"{'killed' if is_killed else 'interrupted'} at {where}"
        if result.code != (-signal.SIGKILL if is_killed else Exit.INTERRUPTED):
            raise UserError(f"{how}: the attempt {_ended(result)}")
        left.remove(kill)
        reached[kill] = f"{how}; {_resumes_from(runs.store(name))}" if is_killed else how


def _resumes_from(store: Store) -> str:
    """The commit from which the next attempt resumes."""
    head = Head.read(store)
    if head is None or not head.checkpoints:
        return "nothing was committed"
    newest = head.checkpoints[-1]
    where = f"step {newest.step} of the run, epoch {newest.epoch}"
    return f"resumes from the {newest.kind} commit at {where}"


def _ended(result: AttemptResult) -> str:
    lines = result.log.splitlines()[-_LOG_LINES:]
    return f"ended with exit code {result.code}:" + "".join(f"\n    {line}" for line in lines)


def _never_interrupted(planned: Sequence[Kill], reached: Mapping[Kill, str]) -> list[str]:
    """Return a sentence for each stage in which no point was reached."""
    return [
        f"stage {stage!r} was never interrupted, so nothing is known about it: the run reached "
        "none of its steps, evaluations or shards; if another stage has made what it prepares, "
        "give it its own key"
        for stage in dict.fromkeys(kill.stage for kill in planned)
        if stage not in {kill.stage for kill in reached}
    ]


def _fewest_steps(outcome: RunOutcome) -> tuple[str, int]:
    """The Train stage with the fewest steps, and their number."""
    counts = Counter(line["stage"] for line in outcome.steps.values())
    return min(counts.items(), key=lambda item: item[1])


def _print(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(line, flush=True)


def _end(
    options: argparse.Namespace, began: float, found: Sequence[str], reached: Sequence[str]
) -> int:
    seconds = time.monotonic() - began
    if options.json:
        record = {
            "resumes_exactly": not found,
            "problems": list(found),
            "interruptions": list(reached),
            "seconds": round(seconds, 1),
        }
        print(json.dumps(record, indent=1))
    else:
        for line in (*(f"  {how}" for how in reached), *(f"[failed] {why}" for why in found)):
            print(line)
    if not found:
        _print(
            options,
            f"[ok] {options.name} resumes exactly: {len(reached)} interruptions, each on a new "
            f"machine, and the same weights, losses and sample ids ({seconds:.0f} s)",
        )
    return Exit.FAILED if found else Exit.FINISHED
