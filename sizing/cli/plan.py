"""Plan a run on one size: does it fit, how long does it take, what does it cost, what is tight.

python -m sizing plan trajectory --recipe full --size g5.2xlarge
python -m sizing plan trajectory --recipe full --size g5.xlarge --micro-batch 8 --json
python -m sizing plan trajectory --recipe full --size g5.2xlarge --runs 4 --unshared-gib 7.3
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.run_env import DATA_PLACES
from sizing.cli.prices import add_price_arguments, ages, given_usd_per_hour, price_cache
from sizing.cli.tables import console, print_json, show
from sizing.models.footprints import FOOTPRINTS_FILE
from sizing.plan.checks import Findings, check_plan
from sizing.plan.dataset import read_manifest
from sizing.plan.plan import Plan, make_plan
from sizing.plan.report import duration, figures, summary, to_json
from sizing.plan.request import Request
from sizing.plan.work import StagePlan
from sizing.spot.traces import load_trace

HELP = "one run on one size: fit, hours, dollars, notice"
_BAR = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("workload", help="as in `python -m training run --workload`")
    parser.add_argument("--recipe", default="full", help="default: %(default)s")
    parser.add_argument("--size", required=True, help="instance type, such as g5.2xlarge")
    add_request_arguments(parser)
    parser.add_argument(
        "--explain", action="store_true", help="also GPU memory by part, and every figure's basis"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that a plan depends on beside workload and size."""
    parser.add_argument("--micro-batch", type=int, help="default: the recipe's")
    parser.add_argument("--batch", type=int, help="samples of a step (default: the recipe's)")
    parser.add_argument("--samples", type=int, help="of the dataset (default: the recipe's)")
    parser.add_argument("--epochs", type=float, help="of every stage (default: the recipe's)")
    parser.add_argument(
        "--gpus",
        "--world",
        type=int,
        default=1,
        help="GPUs of one run, which share its batch (default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="equal runs side by side, spread over the size's GPUs (default: %(default)s)",
    )
    parser.add_argument(
        "--footprints",
        type=Path,
        metavar="FILE",
        default=FOOTPRINTS_FILE,
        help="as `sizing model --keep FILE` wrote it (default: the workloads')",
    )
    parser.add_argument(
        "--unshared-gib",
        type=float,
        default=0.0,
        help="data that each run holds itself; 0: memory-mapped and shared (default)",
    )
    parser.add_argument(
        "--data-on",
        metavar="DISK",
        choices=DATA_PLACES,
        default="ebs",
        help="ebs, a gp3 volume, or nvme, the size's instance store (default: %(default)s)",
    )
    parser.add_argument("--volume-gib", type=int, help="default: 200, or the instance store's")
    parser.add_argument("--dataset-gib", type=float, help="default: the workload's data")
    parser.add_argument(
        "--manifest",
        type=Path,
        metavar="FILE",
        help="a dataset's manifest.json: its size, its samples and, of images, their means",
    )
    parser.add_argument(
        "--interval", default="auto", help="auto, 2epochs, 100steps or 600s (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, help="interruptions per machine hour")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace as in skypilot-org/spot-traces, replayed instead of --rate",
    )
    parser.add_argument(
        "--deadline-hours",
        type=float,
        metavar="N",
        help="on demand where Spot is not enough: what that costs (default: Spot only)",
    )
    add_price_arguments(parser)
    parser.add_argument("--notice", type=float, help="seconds of notice (default: 120)")


def request(arguments: argparse.Namespace, size: str) -> Request:
    """Return the request that the options describe."""
    return Request(
        workload=arguments.workload,
        recipe=arguments.recipe,
        size=size,
        micro_batch=arguments.micro_batch,
        batch=arguments.batch,
        samples=arguments.samples,
        epochs=arguments.epochs,
        gpus=arguments.gpus,
        runs=arguments.runs,
        unshared_gib=arguments.unshared_gib,
        data_on=arguments.data_on,
        volume_gib=arguments.volume_gib,
        dataset_gib=arguments.dataset_gib,
        dataset=read_manifest(arguments.manifest) if arguments.manifest else None,
        checkpoint_interval=arguments.interval,
        rate_per_hour=arguments.rate,
        trace=load_trace(arguments.trace) if arguments.trace else None,
        notice_seconds=arguments.notice,
        deadline_hours=arguments.deadline_hours,
        region=arguments.region,
        zone=arguments.zone,
        price_cache=price_cache(arguments),
    )


def planner(arguments: argparse.Namespace) -> Callable[[Request], Plan]:
    """Return what plans a request by the options' footprints, at what they say its size costs."""

    def plan(asked: Request) -> Plan:
        own = given_usd_per_hour(arguments, asked.size)
        return make_plan(replace(asked, usd_per_hour=own), footprints_file=arguments.footprints)

    return plan


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; the exit code is 1 if it cannot work."""
    plan = planner(arguments)(request(arguments, arguments.size))
    findings = check_plan(plan)
    if arguments.json:
        print_json("plan", to_json(plan, findings))
    else:
        show_plan(plan, findings)
        if arguments.explain:
            show_basis(plan)
    return 1 if findings.problems else 0


def show_plan(plan: Plan, findings: Findings) -> None:
    """Show the result on one screen: what people want to know, and where the time goes."""
    asked = plan.request
    verdict = "cannot work" if findings.problems else "fits"
    show(
        [{"": name, " ": text} for name, text in summary(plan)],
        title=f"{asked.workload}/{asked.recipe} on {asked.size}: {verdict}",
        notes=[
            *(f"refused ({name}): {text}" for name, text in findings.problems.items()),
            *(f"warning: {text}" for text in findings.warnings),
            price_ages([plan]),
        ],
    )
    total = plan.work.seconds or 1.0
    show(
        [row for stage in plan.work.stages for row in _stage_rows(stage, total)],
        title="where the time goes",
        notes=["modelled; dollars are for the instance alone; --explain shows each figure's basis"],
    )


def _stage_rows(stage: StagePlan, total: float) -> Iterator[dict[str, Any]]:
    """A row for each phase of a stage, and for its evaluations where the phases have names."""
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


def show_basis(plan: Plan) -> None:
    """Show GPU memory by part, and every figure that decides with its basis."""
    show(memory_rows(plan), title=f"GPU memory of stage {plan.work.memory.stage}, MiB")
    show(
        [
            {
                "figure": name,
                "value": f"{figure.value:.4g} {figure.unit}",
                "basis": figure.basis,
                "source": figure.source,
            }
            for name, figure in figures(plan).items()
        ],
        title="confidence",
    )
    console().print(
        "measured: counted or run; modelled: computed; published: by others; "
        "from memory: unchecked. Dollars are for the instance alone."
    )


def price_ages(plans: Iterable[Plan]) -> str:
    """Return how old the prices of some plans are."""
    return ages(price for plan in plans for price in (plan.inputs.price, plan.inputs.spot_price))


def memory_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the parts of GPU memory, and what is free."""
    memory, there = plan.work.memory, plan.inputs.instance.gpu_memory_mib
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        f"activations (logits {memory.logits:,.1f})": memory.activations,
        "workspace": memory.workspace,
        "fragments": memory.fragmentation,
        "context": memory.context,
        "free": there - memory.need,
    }
    return [
        {"part": name, "MiB": round(value, 1), "": "#" * round(_BAR * max(0.0, value) / there)}
        for name, value in parts.items()
    ]
