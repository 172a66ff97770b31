"""The command `check`: an uninterrupted run, another one, and one interrupted everywhere."""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.grammar import parse_interval
from training.config import parse_overrides, resolve_config
from training.errors import EXIT_FAILED, EXIT_FINISHED, UserError
from training.preflight.workload_checks import describe, problems
from training.proof.check.runs import InterruptionPoint, Runs, never_interrupted, points
from training.proof.forks import refuse_started_cuda
from training.proof.torture.compare import Outcome, differences
from training.registry import load_workload
from training.store.local_dataset import open_dataset, write_manifest

_DATASET_SEED = 0


def check(options: argparse.Namespace) -> int:
    """Run the checks; exit code 1: the workload does not resume exactly."""
    began = time.monotonic()
    workload = load_workload(options.name)
    found = problems(workload)
    if found:
        return _report_problems(options, found)
    recipe = options.recipe or next(iter(workload.recipes))
    overrides = parse_overrides(options.override)
    config = resolve_config(workload, recipe, overrides)
    interval = parse_interval(options.checkpoint_interval)
    _print(options, f"[ok] protocol: {describe(workload, recipe)}")
    # torch imports it with the first optimizer: 3 s that the forked attempts need not repeat.
    import torch
    import torch._dynamo

    torch.set_num_threads(config.num_threads)
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        runs = Runs(
            *(options.name, recipe, overrides, Path(folder), interval, options.steps),
            num_processes=options.num_processes,
        )
        _prepare_dataset(options, workload, runs)
        refuse_started_cuda(options.name)
        whole = runs.whole("whole")
        stage, fewest = _fewest_steps(whole)
        if fewest < (options.steps or 0):
            raise UserError(
                f"stage {stage!r} has so few samples that it took {fewest} steps, not "
                f"{options.steps}; give a larger --count, or a smaller batch with --override"
            )
        _print(options, f"[ok] uninterrupted run: {len(whole.steps)} steps")
        differing = differences(runs.whole("again"), whole)
        if differing:
            found = [f"two runs without interruption differ: {text}" for text in differing]
            return _end(options, began, found, [])
        _print(options, "[ok] repeated run: the same weights, losses and sample ids")
        planned = points(workload.stages(config), options.steps)
        ours, reached = runs.interrupted("interrupted", planned)
        found = [
            *(f"the interrupted run differs: {text}" for text in differences(ours, whole)),
            *never_interrupted(planned, reached),
        ]
        return _end(options, began, found, reached)


def _fewest_steps(outcome: Outcome) -> tuple[str, int]:
    """The Train stage with the fewest steps, and their number."""
    counts = Counter(line["stage"] for line in outcome.steps.values())
    return min(counts.items(), key=lambda item: item[1])


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


def _report_problems(options: argparse.Namespace, found: Sequence[str]) -> int:
    if options.json:
        print(json.dumps({"resumes_exactly": False, "problems": list(found)}, indent=1))
    for sentence in [] if options.json else found:
        print(f"[failed] {sentence}")
    return EXIT_FAILED


def _print(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(line, flush=True)


def _end(
    options: argparse.Namespace,
    began: float,
    found: Sequence[str],
    reached: Sequence[InterruptionPoint],
) -> int:
    seconds = time.monotonic() - began
    if options.json:
        record = {
            "resumes_exactly": not found,
            "problems": list(found),
            "interruptions": [str(point) for point in reached],
            "seconds": round(seconds, 1),
        }
        print(json.dumps(record, indent=1))
        return EXIT_FAILED if found else EXIT_FINISHED
    for point in reached:
        print(f"  {point}")
    for sentence in found:
        print(f"[failed] {sentence}")
    if not found:
        print(
            f"[ok] {options.name} resumes exactly: {len(reached)} interruptions, each on a new "
            f"machine, and the same weights, losses and sample ids ({seconds:.0f} s)"
        )
    return EXIT_FAILED if found else EXIT_FINISHED
