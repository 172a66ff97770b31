"""Plan a run on one size: whether it fits, how long it takes, what it costs, what is tight.

python -m sizing plan trajectory --recipe full --size g5.2xlarge
python -m sizing plan trajectory --recipe full --size g5.xlarge --micro-batch 8 --json
python -m sizing plan trajectory --recipe full --size g5.2xlarge --runs 4 --unshared-gib 7.3

Compare a finished run with its plan; --calibrate corrects later plans.

python -m sizing plan --run runs/run-1 --size g5.2xlarge
python -m sizing plan --run runs/run-1 --size g5.2xlarge --calibrate
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sizing.cli.shared_options import add_request_arguments, planner, price_ages, request
from sizing.cli.tables import print_json, show_table
from sizing.models.calibration import CALIBRATION_FILE, Entry, add_entry
from sizing.models.memory import MEMORY_PARTS
from sizing.plan.checks import Findings, check_plan
from sizing.plan.finished_run import (
    Compared,
    FinishedRun,
    calibration,
    compare,
    read_run,
    request_of,
    unplanned,
)
from sizing.plan.report import duration, figures, plan_json, summary
from sizing.plan.side_by_side import machines, one_or_several
from sizing.plan.size_plan import Plan
from sizing.plan.work import StagePlan

HELP = "one run on one size: fit, hours, dollars, notice; or a finished run against its plan"
_BAR = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("workload", nargs="?", help="as in `python -m training run --workload`")
    add("--recipe", default="full", help="default: %(default)s")
    add("--size", help="instance type, such as g5.2xlarge (--run: as planned)")
    add("--run", dest="folder", type=Path, help="review this finished run instead")
    add("--calibrate", action="store_true", help="with --run: save its constants for later plans")
    add_request_arguments(parser)
    add("--explain", action="store_true", help="show GPU memory by part, and every figure's basis")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; the exit code is 1 if it cannot work. Or review a finished run."""
    if bool(arguments.workload) == bool(arguments.folder):
        raise ValueError("use either a workload or --run, such as `plan trajectory`")
    if arguments.folder:
        return _review(arguments)
    if arguments.calibrate:
        raise ValueError("--calibrate needs --run: only a finished run has constants to learn")
    if arguments.size is None:
        raise ValueError("add --size, such as g5.2xlarge")
    plan = planner(arguments)(request(arguments, arguments.size))
    findings = check_plan(plan)
    if arguments.json:
        print_json("plan", plan_json(plan, findings))
    else:
        show_plan(plan, findings, explain=arguments.explain)
    return 1 if findings.problems else 0


def _review(arguments: argparse.Namespace) -> int:
    """Print predicted and actual figures; the plan is made with the run's own options."""
    finished = read_run(arguments.folder)
    size = arguments.size or finished.size
    if size is None:
        raise ValueError(
            f"the receipt of {finished.run_id} does not say what it ran on; add --size"
        )
    arguments.workload, arguments.recipe = finished.workload, finished.recipe
    plan = planner(arguments)(request_of(finished, request(arguments, size)))
    rows = compare(finished, plan)
    entry = calibration(finished, plan) if arguments.calibrate else None
    if entry is not None:
        add_entry(entry)
    if arguments.json:
        document = {
            "run": finished.run_id,
            "size": size,
            "device": finished.device,
            "rows": [{**asdict(row), "ratio": row.ratio, "verdict": row.verdict} for row in rows],
            "ignored_overrides": unplanned(finished),
            "calibrated": asdict(entry) if entry else None,
        }
        print_json("plan", document)
        return 0
    learned = [] if entry is None else [_calibrated(entry)]
    _show_review(finished, plan, rows, learned)
    if arguments.explain:
        show_plan(plan, check_plan(plan), explain=True)
    return 0


def _show_review(
    finished: FinishedRun, plan: Plan, rows: Sequence[Compared], learned: Sequence[str]
) -> None:
    size = plan.request.size
    show_table(
        [
            {
                "what": row.what,
                "predicted": row.predicted,
                "actual": row.actual,
                "unit": row.unit,
                "actual is": None if row.ratio is None else f"{row.ratio:.2f} x",
                "verdict": row.verdict,
            }
            for row in rows
        ],
        title=f"run {finished.run_id}: {finished.workload}/{finished.recipe} on {size}",
        notes=[*_review_notes(finished, plan), *learned],
    )


def _review_notes(finished: FinishedRun, plan: Plan) -> list[str]:
    origin = "config.json" if finished.prediction else "a plan made now"
    ignored = unplanned(finished)
    return [
        *([f"the plan ignores {', '.join(ignored)}"] if ignored else []),
        f"predicted: {origin}, for {plan.request.size}; "
        f"actual: {finished.device}, {finished.state}",
        price_ages([plan]),
    ]


def _calibrated(entry: Entry) -> str:
    learned = ", ".join(f"{name} {value:g}" for name, value in entry.constants.items())
    return f"calibrated: {learned}; written to {CALIBRATION_FILE}"


def show_plan(plan: Plan, findings: Findings, *, explain: bool = False) -> None:
    """Show the result on one screen: the main figures, and where the time goes.

    `explain` adds GPU memory by part and the basis of every decisive figure.
    """
    asked = plan.request
    verdict = "cannot work" if findings.problems else "fits"
    show_table(
        [{"": name, " ": text} for name, text in summary(plan)],
        title=f"{asked.workload}/{asked.recipe} on {machines(asked)}: {verdict}",
        notes=[
            *([one_or_several(plan)] if asked.hosts > 1 else []),
            *(f"refused ({name}): {text}" for name, text in findings.problems.items()),
            *(f"warning: {text}" for text in findings.warnings),
            price_ages([plan]),
        ],
    )
    total = plan.work.seconds or 1.0
    show_table(
        [row for stage in plan.work.stages for row in _stage_rows(stage, total)],
        title="where the time goes",
        notes=["modelled; dollars are for the instance alone; --explain shows each figure's basis"],
    )
    if explain:
        _show_basis(plan)


def _stage_rows(stage: StagePlan, total: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each phase of a stage, and for its evaluations if the phases have names."""
    parts: list[tuple[str, str, float, str]] = [
        (phase.phase.name, f"{phase.phase.epochs:g}", phase.seconds, phase.bound_by)
        for phase in stage.phases
    ]
    steps = [duration(phase.step.seconds) for phase in stage.phases]
    if len(parts) > 1:
        parts.append(("evaluation", "", stage.evaluation_seconds, "GPU"))
        steps.append("")
    else:
        parts = [("", parts[0][1], stage.seconds, stage.bound_by)]
    for (name, epochs, seconds, bound_by), step in zip(parts, steps, strict=True):
        yield {
            "stage": f"{stage.footprint.stage}, {name}" if name else stage.footprint.stage,
            "epochs": epochs,
            "steps each": stage.footprint.steps_per_epoch if epochs else "",
            "a step": step,
            "GPU MiB": round(stage.memory.need) if epochs else "",
            "time": duration(seconds),
            "%": round(100 * seconds / total),
            "bound by": bound_by,
        }


def _show_basis(plan: Plan) -> None:
    show_table(_memory_rows(plan), title=f"GPU memory of stage {plan.work.memory.stage}, MiB")
    show_table(
        [
            {
                "figure": name,
                "value": f"{figure['value']:.4g} {figure['unit']}",
                "basis": figure["basis"],
                "source": figure["source"],
            }
            for name, figure in figures(plan).items()
        ],
        title="confidence",
        notes=[
            "measured: counted or run; modelled: computed; published: by others; "
            "from memory: unchecked. Dollars are for the instance alone."
        ],
    )


def _memory_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the parts of GPU memory, and what is free."""
    memory, there = plan.work.memory, plan.inputs.instance.gpu_memory_mib
    words = {
        "activations": f"activations (logits {memory.logits:,.1f})",
        "fragmentation": "fragments",
    }
    parts = {words.get(name, name): getattr(memory, name) for name in MEMORY_PARTS}
    parts["free"] = there - memory.need
    return [
        {"part": name, "MiB": round(value, 1), "": "#" * round(_BAR * max(0.0, value) / there)}
        for name, value in parts.items()
    ]
