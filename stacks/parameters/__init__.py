"""All parameters of a deployment: decided for one instance size, overridden by name from context.

cdk.json has the defaults, with "by-size" or "by-plan" for what follows from those. Unknown names
and impossible values are refused in one sentence. Tables: python -m stacks.parameters --help
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sizing import PRICE_REGION, NotMeasuredError, Plan, catalogue
from stacks.parameters import checks
from stacks.parameters.context import (
    LEFT_OPEN,
    QUALIFIER,
    defaults,
    flatten,
    of_cdk_json,
    parse,
    parse_text,
    refuse_unknown_names,
)
from stacks.parameters.decisions import DECISIONS, PLANNED, check_limits, plan_sizes, with_limits
from stacks.parameters.fields import GROUPS, OPEN_GROUPS, ParameterFields
from stacks.parameters.programs import check_program, workload_of_program

# Checks of everything but limits, which a plan of checked parameters decides.
CHECKS = (
    checks.check_name,
    checks.check_names,
    check_program,
    checks.check_size,
    checks.check_ranges,
    checks.check_volumes,
    checks.check_fleet,
    checks.check_times,
    checks.check_alarms,
    checks.check_budget,
    checks.check_kept,
    checks.check_review,
    checks.check_network,
    checks.check_tags,
    checks.check_sweep,
    # Last: it imports torch, in another process.
    checks.check_by_trainer,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackParameters(ParameterFields):
    """The checked parameters of all stacks. Build them with `for_size` or `from_context`."""

    region: str  # whose prices count, unless the stack has a region of its own
    plans: tuple[Plan, ...]  # of the run, at its prices: on the size, then others; or none
    why_unplanned: str

    @staticmethod
    def options(context: Mapping[str, object]) -> str:
        """Return the CLI's `-c` options by which a CDK context differs from cdk.json."""
        usual, given = defaults(), flatten(context)
        if (qualifier := context.get(QUALIFIER)) != of_cdk_json().get(QUALIFIER):
            given[QUALIFIER] = qualifier
        changed = {k: v for k, v in sorted(given.items()) if v != usual.get(k)}
        words = {k: " ".join(v) if isinstance(v, list | tuple) else v for k, v in changed.items()}
        return "".join(f" -c {shlex.quote(f'{k}={v}')}" for k, v in words.items())

    @classmethod
    def for_size(
        cls, size: str, *, region: str = PRICE_REGION, **overrides: object
    ) -> "StackParameters":
        """Return the parameters of `size` with cdk.json's defaults and the given overrides."""
        context = {**defaults(), **flatten(overrides), "size": size}
        return cls.from_context(context, region=region)

    @classmethod
    def from_context(
        cls, context: Mapping[str, object], *, region: str = PRICE_REGION
    ) -> "StackParameters":
        """Return the parameters in a CDK context, ignoring CDK's own keys; dollars by `region`."""
        given = flatten(context)
        refuse_unknown_names(given)
        values = workload_of_program({**defaults(), **given})
        instance = catalogue.find(parse_text("size", values["size"]))
        for name, decide in DECISIONS.items():
            if values[name] in LEFT_OPEN:
                values[name] = decide(instance, values)
        planned = [name for name in PLANNED if values[name] in LEFT_OPEN]
        values |= dict.fromkeys(planned, 0)
        parameters = cls(**_nested(values), region=region, plans=(), why_unplanned="")
        # Before planning, which would refuse with a different message.
        for check in CHECKS:
            check(parameters)
        try:
            plans = plan_sizes(parameters, region)
        except NotMeasuredError as unknown:
            plans, parameters = (), replace(parameters, why_unplanned=str(unknown))
        for name in planned:
            limit: Any = {name: PLANNED[name](parameters, plans, region)}
            parameters = replace(parameters, **limit)
        check_limits(parameters)
        return replace(parameters, plans=tuple(with_limits(plan, parameters) for plan in plans))


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values, parsed, by the fields of ParameterFields."""
    fields: dict[str, Any] = {name: {} for name in (*OPEN_GROUPS, *GROUPS)}
    for name, value in values.items():
        group, _, inner = name.partition(".")
        if inner:
            fields[group][inner] = parse(name, value)
        else:
            fields[name] = parse(name, value)
    return fields | {name: group(**fields[name]) for name, group in GROUPS.items()}
