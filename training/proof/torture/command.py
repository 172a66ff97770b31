"""The command `torture`: its options, progress lines and result."""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract.errors import Exit, UserError
from contract.grammar import parse_interval
from training import ResolvedWorkload, Workload, load_workload, parse_overrides
from training.proof.attempt import AttemptRequest
from training.proof.experiment import Runs, made_dataset, refuse_started_cuda
from training.proof.injector import SIGNALS
from training.proof.torture.series import PHASES, Size, Torture, Totals

_BUILT_IN = "training.proof.torture.small_workload:SMALL"
_COUNT, _BUILT_IN_COUNT = 100, 77


def torture(options: argparse.Namespace) -> int:
    """Run the torture; exit code 1 if anything differed."""
    import torch

    # torch imports them with the first optimizer and the first model that ranks share: seconds that
    # the forked attempts need not repeat.
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict

    # A fork of a process with threads may inherit a lock that is never released.
    torch.set_num_threads(1)
    workload = load_workload(options.workload)
    recipes = _recipes(options, workload)
    overrides = parse_overrides(options.override)
    resolved = {recipe: ResolvedWorkload.of(workload, recipe, overrides) for recipe in recipes}
    intervals = options.checkpoint_interval.split(",")
    for interval in intervals:
        parse_interval(interval)
    if options.count is None:
        options.count = _BUILT_IN_COUNT if options.workload == _BUILT_IN else _COUNT
    for name in ("kills", "seeds", "count"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} is {getattr(options, name)}; give at least 1")
    sizes = _sizes(options)
    out = options.out or Path(tempfile.mkdtemp(prefix="torture-"))
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; use a new folder")
    out.mkdir(parents=True, exist_ok=True)
    dataset = made_dataset(options.dataset_uri, workload, options.count, out / "dataset")
    assert threading.active_count() == 1
    refuse_started_cuda(options.workload)
    series = Torture(
        runs=Runs(
            request=AttemptRequest(
                workload=options.workload,
                recipe=recipes[0],
                overrides=overrides,
                dataset=str(dataset),
                interval=intervals[0],
                ttl_seconds=options.lease_ttl_seconds,
                budget_seconds=options.notice_budget_seconds,
            ),
            uri=options.run_uri or str(out / "runs"),
            out=out,
        ),
        recipes=recipes,
        sizes=sizes,
        recipes_of_ranks={name for name, each in resolved.items() if each.depends_on_ranks},
        intervals=intervals,
        stops_at_first=options.exitfirst,
        num_kills=options.kills,
    )
    return _go(series, options)


def _go(torture: Torture, options: argparse.Namespace) -> int:
    seeds = range(options.seed, options.seed + options.seeds)
    for number, seed in enumerate(seeds):
        share = options.kills * (number + 1) // len(seeds) - options.kills * number // len(seeds)
        if share:
            torture.go(seed, share)
    return _end(torture, options, time.monotonic() - torture.began)


def _end(torture: Torture, options: argparse.Namespace, seconds: float) -> int:
    totals, out = torture.totals, torture.runs.out
    is_equal = not totals.differences
    if options.json:
        print(json.dumps(_record(options, totals, seconds), indent=1))
    else:
        print("\n".join([*_table(totals), *_lines(totals)]))
        print(
            f"{totals.kills} kills in {totals.runs} runs and {totals.attempts} attempts "
            f"({totals.fresh_attempts} in fresh interpreters), {totals.faults} store faults, "
            f"{totals.steps_repeated} of {totals.steps} steps repeated, "
            f"{totals.checkpoints_passed_over} checkpoints passed over, {seconds:.0f} s"
        )
        for line in totals.differences:
            print(f"[failed] {line}")
        if is_equal:
            print("[ok] every run equals the uninterrupted one: weights, losses, sample ids")
    if is_equal and options.out is None:
        shutil.rmtree(out)
    elif not is_equal:
        print(f"runs and logs are kept in {out}", file=sys.stderr)
    return Exit.FINISHED if is_equal else Exit.FAILED


def _record(options: argparse.Namespace, totals: Totals, seconds: float) -> dict[str, Any]:
    return {
        **asdict(totals),
        "by_kind_and_phase": _by_second(totals.by_kind_and_phase),
        "by_kind_and_ranks": _by_second(totals.by_kind_and_ranks),
        "runs_with": {
            what: dict(sorted(cards.items())) for what, cards in totals.runs_with.items()
        },
        "dated_ended_by": dict(sorted(totals.dated_ended_by.items())),
        "attempts_by_ranks": dict(sorted(totals.attempts_by_ranks.items())),
        "exit_codes": {str(code): count for code, count in sorted(totals.exit_codes.items())},
        "is_equal": not totals.differences,
        "workload": options.workload,
        "seeds": list(range(options.seed, options.seed + options.seeds)),
        "seconds": round(seconds, 1),
    }


def _by_second(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Nest for JSON: by phase or signalled ranks, then by kind."""
    nested: dict[str, dict[str, int]] = {}
    for (kind, second), count in sorted(counts.items()):
        nested.setdefault(second, {})[kind] = count
    return nested


def _lines(totals: Totals) -> Sequence[str]:
    """Lines about the runs' variants, signalled ranks and dated notices."""
    lines = [
        f"runs by {what}: {', '.join(f'{card} {n}' for card, n in sorted(cards.items()))}"
        for what, cards in totals.runs_with.items()
    ]
    for ranks, kinds in sorted(_by_second(totals.by_kind_and_ranks).items()):
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        lines.append(f"with several ranks, at {ranks}: {counts}")
    sizes = sorted(totals.attempts_by_ranks.items())
    lines.append(f"attempts by ranks: {', '.join(f'{size} {count}' for size, count in sizes)}")
    ends = ", ".join(f"{what} {count}" for what, count in sorted(totals.dated_ended_by.items()))
    lines.append(
        f"notices with a time: {totals.dated_notices}, of which {totals.dated_trained_on} trained "
        f"on, {totals.steps_gained} steps gained; ended by: {ends or 'none'}"
    )
    return lines


def _table(totals: Totals) -> Sequence[str]:
    """Kills by what the attempt was doing (rows) and kind (columns)."""
    kinds = list(SIGNALS)
    known = list(PHASES)
    phases = sorted(
        {phase for _, phase in totals.by_kind_and_phase},
        key=lambda phase: (known.index(phase) if phase in known else -1, phase),
    )
    lines = [f"{'while':<18}" + "".join(f"{kind:>8}" for kind in kinds) + f"{'all':>8}"]
    for phase in phases:
        counts = [totals.by_kind_and_phase[kind, phase] for kind in kinds]
        cells = "".join(f"{count or '':>8}" for count in counts)
        lines.append(f"{phase:<18}{cells}{sum(counts):>8}")
    return lines


def _recipes(options: argparse.Namespace, workload: Workload[Any]) -> Sequence[str]:
    if options.recipe is not None:
        return str(options.recipe).split(",")
    if options.workload == _BUILT_IN:
        return sorted(workload.recipes)
    return [next(iter(workload.recipes))]


def _sizes(options: argparse.Namespace) -> Sequence[Size]:
    """Sizes to draw from, attempt by attempt."""
    from torch import cuda

    gpus = cuda.device_count()
    counts = [n for n in (1, 2, 4) if n <= (gpus or n)]
    own = ",".join(map(str, counts)) if options.workload == _BUILT_IN else "1"
    text = options.num_processes or own
    try:
        sizes = [Size(*reversed([int(n) for n in size.split("x")])) for size in text.split(",")]
    except (ValueError, TypeError) as error:
        message = f"--num-processes is {text!r}; give numbers, such as 1 or 1,2 or 4x2"
        raise UserError(message) from error
    if min(min(size) for size in sizes) < 1:
        raise UserError(f"--num-processes is {text!r}; give numbers of at least 1")
    if 0 < gpus < max(size.each for size in sizes):
        raise UserError(f"--num-processes is {text!r}; each rank needs a GPU, and there are {gpus}")
    return sizes
