"""The plan at synth: how long the run will take and what it will cost, before any deploy.

It annotates TrainingStack and is written beside its template as <stack>.plan.json. A plan that
cannot work makes synth fail, unless its problem is accepted by name: -c accept=memory.
"""

import json
import re
from pathlib import Path
from typing import Any

from aws_cdk import Annotations, Stack, Token

from sizing.catalogue import PRICE_REGION, hourly_price
from sizing.models.footprints import NotMeasuredError
from sizing.plan.checks import check_plan
from sizing.plan.plan import Plan, make_plan
from sizing.plan.report import one_line, to_json
from sizing.plan.request import Request
from stacks.parameters import StackParameters

# The only override that footprints cover; what others change, only a measurement shows.
_MICRO_BATCH = "micro_batch"
_PREDICTED = (
    *("size", "hours_p50", "hours_p90", "usd_on_demand", "usd_spot_p50", "usd_spot_p90"),
    *("usd_spot_per_hour", "gpu_memory_mib", "interruptions", "restart_seconds"),
)
# Problems that only interruptions cause: accepted when no Spot instance is used.
_SPOT_PROBLEMS = ("spot", "notice")


def plan_run(parameters: StackParameters, region: str = PRICE_REGION) -> Plan:
    """Return the plan of the stack's run, at a region's prices."""
    return make_plan(_request(parameters, region))


def _price_region(stack: Stack, size: str) -> str:
    """Return the stack's region where it is known and the size has a price there, else us-east-1.

    Only the catalogue's own prices count: the same commit gives the same template.
    """
    if Token.is_unresolved(stack.region):
        return PRICE_REGION
    try:
        hourly_price(size, stack.region)
    except ValueError:
        return PRICE_REGION
    return stack.region


def _accepted(parameters: StackParameters) -> tuple[str, ...]:
    """Return the problems that become warnings instead of refusing the plan."""
    if parameters.on_demand_base >= parameters.target_capacity:
        return (*parameters.accept, *_SPOT_PROBLEMS)
    return parameters.accept


def _request(p: StackParameters, region: str) -> Request:
    overrides = dict(text.split("=", 1) for text in p.overrides)
    micro_batch = overrides.get(_MICRO_BATCH, "")
    return Request(
        workload=p.workload,
        recipe=p.recipe,
        size=p.size,
        micro_batch=int(micro_batch) if micro_batch.isdecimal() else None,
        volume_gib=p.data_volume_gib,
        volume_mib_per_second=p.data_volume_mib_per_second,
        notice_seconds=p.notice_budget_seconds,
        trains_on_at_notice=p.notice_policy == "train-on",
        checkpoint_interval=p.checkpoint_interval,
        dataset_gib=p.dataset_gib or None,
        region=region,
        # Each pair of zone and size is a Spot pool; without given zones there are two.
        pools=max(1, len(p.zones) or 2) * len(p.sizes),
        max_hours=p.max_hours,
    )


def annotate(stack: Stack, parameters: StackParameters) -> dict[str, Any] | None:
    """Annotate `stack` with the plan and return it; None where nothing can be predicted.

    A plan that cannot work is a ValueError with the smallest change that would pass.
    """
    notes = Annotations.of(stack)
    try:
        plan = plan_run(parameters, _price_region(stack, parameters.size))
    except NotMeasuredError as unknown:
        notes.add_info_v2("plan:none", f"no plan: {unknown}")
        return None
    findings = check_plan(plan).accepting(_accepted(parameters))
    refused = "; ".join(findings.problems.values())
    if refused:
        names = ",".join(findings.problems)
        raise ValueError(f"{refused} (to deploy anyway: -c accept={names})")
    notes.add_info_v2("plan", one_line(plan))
    for warning in (*findings.warnings, *_unplanned(parameters)):
        # `cdk acknowledge` takes this id: the first words of the warning, without figures.
        words = re.findall(r"(?<!\S)[a-z]+(?!\S)", warning.lower())
        notes.add_warning_v2("plan:" + "-".join(words[:5]), warning)
    return to_json(plan, findings)


def _unplanned(parameters: StackParameters) -> list[str]:
    """Warn of overrides that the plan does not cover."""
    names = [text.split("=")[0] for text in parameters.overrides]
    others = sorted(set(names) - {_MICRO_BATCH})
    if not others:
        return []
    return [
        f"the plan ignores {', '.join(others)}, whose effect was not measured "
        "(`python -m training measure --override NAME=VALUE` shows it)"
    ]


def prediction(plan: dict[str, Any] | None) -> str:
    """Return the plan's figures as NAME=VALUE words, for the run's config.json and receipt.

    Rounded to three digits, so that smaller changes leave the launch template alone.
    """
    if plan is None:
        return ""
    figures = {name: plan[name] for name in _PREDICTED if plan[name] is not None}
    return " ".join(
        f"{name}={value if isinstance(value, str) else format(value, '.3g')}"
        for name, value in figures.items()
    )


def write_plan(folder: Path, stack_name: str, plan: dict[str, Any]) -> Path:
    """Write the plan beside the stack's template."""
    path = folder / f"{stack_name}.plan.json"
    path.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    return path
