"""The plan at synth: what the run will take and cost, said before anything is deployed.

Said as annotations on TrainingStack and written beside its template as <stack>.plan.json. A plan
that cannot work refuses the synthesis, unless its problem is accepted by name: -c accept=memory.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from aws_cdk import Annotations, Stack

from sizing.models.footprints import NotMeasuredError
from sizing.plan.checks import check_plan
from sizing.plan.plan import Plan, make_plan
from sizing.plan.report import one_line, to_json
from sizing.plan.request import Request
from stacks.parameters import StackParameters

# Overrides that the footprints know; others change the run in ways that only a measurement shows.
_MICRO_BATCH = "micro_batch"
_TAKEN_ALONG = (
    *("size", "hours_p50", "hours_p90", "usd_on_demand", "usd_spot_p50", "usd_spot_p90"),
    *("usd_spot_per_hour", "gpu_memory_mib", "interruptions", "restart_seconds"),
)
# What is only a matter of being interrupted.
_OF_SPOT = ("spot", "notice")


def plan_run(parameters: StackParameters) -> Plan:
    """The plan of what the stack will run."""
    return make_plan(_request(parameters))


def _accepted(parameters: StackParameters) -> tuple[str, ...]:
    """The problems that do not refuse the plan."""
    if parameters.on_demand_base >= parameters.target_capacity:
        return (*parameters.accept, *_OF_SPOT)
    return parameters.accept


def _request(p: StackParameters) -> Request:
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
        # A fleet chooses among zones and sizes; without zones given there are two.
        pools=max(1, len(p.zones) or 2) * len(p.sizes),
        max_hours=p.max_hours,
    )


def annotate(stack: Stack, parameters: StackParameters) -> dict[str, Any] | None:
    """Say the plan on `stack` and return it; None where nothing can be predicted.

    What cannot work is a ValueError with the smallest change that would pass.
    """
    notes = Annotations.of(stack)
    try:
        plan = plan_run(parameters)
    except NotMeasuredError as unknown:
        notes.add_info_v2("plan:none", f"no plan: {unknown}")
        return None
    findings = check_plan(plan).accepting(_accepted(parameters))
    refused = "; ".join(findings.problems.values())
    if refused:
        names = ",".join(findings.problems)
        raise ValueError(f"{refused} (to deploy it all the same: -c accept={names})")
    notes.add_info_v2("plan", one_line(plan))
    for warning in (*findings.warnings, *_unplanned(parameters)):
        # The id is what `cdk acknowledge` names: the first words, figures left out.
        words = re.findall(r"(?<!\S)[a-z]+(?!\S)", warning.lower())
        notes.add_warning_v2("plan:" + "-".join(words[:5]), warning)
    return to_json(plan, findings)


def _unplanned(parameters: StackParameters) -> list[str]:
    """Overrides that the plan cannot know."""
    names = [text.split("=")[0] for text in parameters.overrides]
    others = sorted(set(names) - {_MICRO_BATCH})
    if not others:
        return []
    return [
        f"the plan is the recipe's: what {', '.join(others)} changes was not measured "
        "(`python -m training measure --override NAME=VALUE` shows it)"
    ]


def prediction(plan: dict[str, Any] | None) -> str:
    """What the run takes along as NAME=VALUE words, for its config.json and its receipt.

    Three digits: the launch template must not change for less.
    """
    if plan is None:
        return ""
    figures = {name: plan[name] for name in _TAKEN_ALONG if plan[name] is not None}
    return " ".join(
        f"{name}={value if isinstance(value, str) else format(value, '.3g')}"
        for name, value in figures.items()
    )


def write_plan(folder: Path, stack_name: str, plan: dict[str, Any]) -> Path:
    """Write the plan beside the stack's template."""
    path = folder / f"{stack_name}.plan.json"
    path.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    return path
