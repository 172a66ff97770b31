"""The plan at synth: how long the run will take and what it will cost, before any deploy.

It annotates TrainingStack and is written next to its template as <stack>.plan.json. A plan that
cannot work makes synth fail, unless its problem is accepted by name: -c accept=memory.
"""

import json
import re
from pathlib import Path
from typing import Any

from aws_cdk import Annotations, Stack, Token

from contract.certificate import certified
from contract.goodput import PLANNED
from contract.keys import MANIFEST
from sizing import (
    IMAGE_GIB,
    Findings,
    Plan,
    PriceBook,
    check_plan,
    deadline_fallback,
    deadline_sentence,
    initialization_usd,
    plan_json,
    plan_line,
)
from stacks.parameters import StackParameters
from stacks.parameters.decisions import MICRO_BATCH, plan_sizes, unplanned
from stacks.parameters.programs import program_of

_PREDICTED = (
    *("size", "hours_p50", "hours_p90", "usd_on_demand", "usd_spot_p50", "usd_spot_p90"),
    *("usd_spot_per_hour", "gpu_memory_mib", "interruptions", "restart_seconds", "life_hours"),
)
_KNOWN = (
    "known are the price of an hour (Sizes) and when the run is stopped (Limits), which max_hours "
    "and max_usd change"
)
# Problems that only interruptions cause: accepted when no Spot instance is used.
_SPOT_PROBLEMS = ("spot", "notice")


def price_book(stack: Stack, parameters: StackParameters) -> PriceBook:
    """Return the prices of the stack's region, or of the parameters' where the stack has none.

    Only the catalogue's own prices count: the same commit gives the same template.
    """
    unknown = Token.is_unresolved(stack.region)
    return PriceBook(region=parameters.region if unknown else stack.region, assumes=True)


def _accepted(parameters: StackParameters) -> tuple[str, ...]:
    """Return the problems that become warnings instead of refusing the plan."""
    if parameters.on_demand_base >= parameters.target_capacity:
        return (*parameters.accept, *_SPOT_PROBLEMS)
    return parameters.accept


def annotate(stack: Stack, parameters: StackParameters) -> dict[str, Any] | None:
    """Annotate `stack` with the plan and return it; None where nothing can be predicted.

    A plan that cannot work is a ValueError with the smallest change that would pass.
    """
    notes, book = Annotations.of(stack), price_book(stack, parameters)
    notes.add_info_v2("plan:limits", limits(parameters))
    if parameters.sizes[1:]:
        notes.add_info_v2("plan:sizes", f"the fleet may start {offered(parameters, book)}")
    for text in _unknown_prices(parameters, book):
        notes.add_warning_v2("plan:prices", text)
    if parameters.instance.needs_own_image:
        notes.add_warning_v2(
            "image:size",
            f"whether {parameters.pytorch_ami_parameter} supports {parameters.size} is not known: "
            "`make doctor` asks the image, and a machine without a driver fails at boot",
        )
    if parameters.root_volume.initialization_mib_per_second:
        notes.add_info_v2("plan:root", root_volume(parameters))
    notes.add_info_v2(
        "plan:dataset",
        f"the machine waits {parameters.dataset_wait_seconds / 60:g} min for {parameters.dataset}/"
        f"{MANIFEST} in the dataset bucket; `make doctor` prints the command that puts it there",
    )
    if parameters.program:
        _annotate_program(notes, parameters)
        return None
    plans = parameters.plans
    if not plans:
        if parameters.deadline_hours:
            raise ValueError(
                f"deadline_hours is {parameters.deadline_hours:g}, but how long the run takes is "
                f"not known: {parameters.why_unplanned}"
            )
        notes.add_info_v2("plan:none", f"no plan: {parameters.why_unplanned}; {_KNOWN}")
        return None
    if book.region != parameters.region:
        plans = plan_sizes(parameters, book.region)
    plan, findings = plans[0], _judge(plans[0], parameters)
    notes.add_info_v2("plan", plan_line(plan))
    for other in plans[1:]:
        _judge(other, parameters)
        notes.add_info_v2(f"plan:{other.request.size}", plan_line(other))
    fallback = deadline_fallback(plan)
    if fallback is not None:
        deadline = f"deadline_hours={fallback.deadline_hours:g}: {deadline_sentence(fallback)}"
        notes.add_info_v2("plan:deadline", deadline)
    for warning in (*findings.warnings, *_ignored(unplanned(parameters))):
        # `cdk acknowledge` takes this id: the first words of the warning, without figures.
        words = re.findall(r"(?<!\S)[a-z]+(?!\S)", warning.lower())
        notes.add_warning_v2("plan:" + "-".join(words[:5]), warning)
    return plan_json(plan, findings)


def _judge(plan: Plan, parameters: StackParameters) -> Findings:
    """Return the findings against a plan; ValueError if they refuse it."""
    idle = plan.inputs.instance.num_gpus - plan.request.gpus
    if parameters.mix_gpu_counts and idle:
        raise ValueError(
            f"mix_gpu_counts is true, but {idle} of {plan.inputs.instance.num_gpus} GPUs of "
            f"{plan.request.size} would have no micro-batch of a step; use a smaller "
            f"{MICRO_BATCH}, or false"
        )
    findings = check_plan(plan).accepting(_accepted(parameters))
    if findings.problems:
        refused, names = "; ".join(findings.problems.values()), ",".join(findings.problems)
        is_other = plan.request.size != parameters.size
        where = f"on {plan.request.size}, by mix_gpu_counts, " if is_other else ""
        raise ValueError(f"{where}{refused} (to deploy anyway: -c accept={names})")
    return findings


def _annotate_program(notes: Annotations, p: StackParameters) -> None:
    """Annotate what is known of a program before it runs and what is not; refuse a deadline."""
    if p.deadline_hours:
        raise ValueError(
            f"deadline_hours is {p.deadline_hours:g}, but how long a program takes is not known; "
            "use 0, or on_demand_base=1 so that it never waits for Spot"
        )
    notes.add_info_v2(
        "plan:program",
        f"no plan: how long {p.program!r} takes, how much memory it needs and whether it saves "
        f"within a notice is not known before it runs; {_KNOWN}",
    )
    notes.add_info_v2("plan:certificate", certified(Path(p.source), program_of(p))["is"])


def limits(p: StackParameters) -> str:
    """Say when the Guard ends this run, and what it buys to meet a deadline."""
    ends = [f"{p.max_hours:g} billed hours"]
    ends += [f"${p.max_usd:g}"] if p.max_usd else []
    budget = p.budget
    ends += [f"${budget.usd:g} a {budget.period} of {budget.name}"] if budget.name else []
    ends += [f"{p.max_wait_hours:g} hours without a machine"] if p.max_wait_hours else []
    text = f"the Guard stops the run at {' or '.join(ends)}"
    if not p.deadline_hours:
        return f"{text}; there is no deadline, so it waits for Spot"
    return f"{text}; it buys on-demand capacity to end within {p.deadline_hours:g} hours"


def _unknown_prices(p: StackParameters, book: PriceBook) -> list[str]:
    """Warn if a price is not known in the region: the limit in dollars then holds only roughly."""
    assumed = [size for size in p.sizes if book.require(size)[0].basis == "assumed"]
    if not assumed:
        return []
    return [
        f"no price of {', '.join(assumed)} in {book.region} is known: the plan, max_usd and the "
        f"Guard use {book.require(assumed[0])[0].source}; set max_usd by the real price"
    ]


def root_volume(p: StackParameters) -> str:
    """Say what each machine's root volume costs before anything else."""
    rate = p.root_volume.initialization_mib_per_second
    return (
        f"each machine that boots, replacements too, costs ${initialization_usd(rate):.3f} more: "
        f"its root volume is loaded at {rate} MiB/s ({IMAGE_GIB} GiB, modelled; max_usd does not "
        "count it)"
    )


def offered(p: StackParameters, book: PriceBook) -> str:
    """Say which sizes the fleet may start, and what the most expensive one costs."""
    usd = {size: book.require(size)[0].usd_per_hour for size in p.sizes}
    dearest = max(usd, key=lambda size: usd[size])
    _, spot = book.require(dearest)
    return (
        f"{', '.join(p.sizes)}; the dearest, {dearest}, costs ${usd[dearest]:.3f} an hour on "
        f"demand ({usd[dearest] / usd[p.size]:.1f} times {p.size}), ${spot.usd_per_hour:.3f} on "
        f"Spot ({spot.basis}), in {book.region}"
    )


def _ignored(overrides: list[str]) -> list[str]:
    """Warn of overrides that the plan does not cover."""
    warning = (
        f"the plan ignores {', '.join(overrides)}, whose effect was not measured "
        "(`python -m training measure --override NAME=VALUE` shows it)"
    )
    return [warning] if overrides else []


def prediction(plan: dict[str, Any] | None) -> str:
    """Return the plan's figures as NAME=VALUE words, for the run's config.json and receipt.

    Rounded to three digits, so that smaller changes leave the launch template alone.
    """
    if plan is None:
        return ""
    figures = {name: plan[name] for name in _PREDICTED if plan[name] is not None}
    figures |= {PLANNED + cause: share for cause, share in plan["goodput"].items()}
    return " ".join(
        f"{name}={value if isinstance(value, str) else format(value, '.3g')}"
        for name, value in figures.items()
    )


def epoch_seconds(plan: dict[str, Any] | None) -> float | None:
    """Return the seconds of the main stage's epoch, or of the stage if it ends within one."""
    if plan is None:
        return None
    longest = max(stage["seconds"] for stage in plan["stages"])
    return min(float(plan["epoch_seconds"]), float(longest))


def least_busy_percent(plan: dict[str, Any] | None) -> float | None:
    """Return the lowest percent that the GPU is busy in a healthy run (p10 of similar runs).

    A run bound by kernel launches or by data leaves it idle most of the time.
    """
    return None if plan is None else float(plan["gpu_busy_percent"][0])


def write_plan(folder: Path, artifact_id: str, plan: dict[str, Any]) -> Path:
    """Write the plan next to the stack's template."""
    path = folder / f"{artifact_id}.plan.json"
    path.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    return path
