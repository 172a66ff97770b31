"""All parameters of a deployment: decided for one instance size, overridden by name from context.

cdk.json has the defaults, with "by-size" or "by-plan" for what follows from those. Unknown names
and impossible values are refused in one sentence. Tables: python -m stacks.parameters --help
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sizing import catalogue
from stacks.parameters import checks, protection
from stacks.parameters.context import (
    LEFT_OPEN,
    Named,
    defaults,
    parse,
    parse_text,
    refuse_unknown_names,
    with_named,
    without_cdk_keys,
)
from stacks.parameters.decisions import DECISIONS
from stacks.parameters.fields import ParameterFields
from stacks.parameters.limits import PLANNED, check_limits
from stacks.parameters.programs import check_program, workload_of_program

# Of everything but limits, which a plan of checked parameters decides.
CHECKS = (
    checks.check_names,
    check_program,
    checks.check_size,
    checks.check_volumes,
    checks.check_fleet,
    checks.check_times,
    checks.check_alarms,
    protection.check_kept,
    protection.check_review,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackParameters(ParameterFields):
    """The checked parameters of all stacks. Build them with `for_size` or `from_context`."""

    @classmethod
    def for_size(cls, size: str, **overrides: object) -> "StackParameters":
        """Return the parameters of `size` with cdk.json's defaults and the given overrides."""
        return cls.from_context({**defaults(), **overrides, "size": size})

    @classmethod
    def from_context(cls, context: Mapping[str, object]) -> "StackParameters":
        """Return the parameters in a CDK context, ignoring CDK's own keys."""
        fields = dataclasses.fields(cls)
        named = [field.name for field in fields if field.type == Named]
        given = with_named(without_cdk_keys(context), named)
        refuse_unknown_names(given, [field.name for field in fields])
        values = workload_of_program({**defaults(), **given})
        instance = catalogue.find(parse_text("size", values["size"]))
        for name, decide in DECISIONS.items():
            if values[name] in LEFT_OPEN:
                values[name] = decide(instance, values)
        planned = [name for name in PLANNED if values[name] in LEFT_OPEN]
        values |= dict.fromkeys(planned, 0)
        parsed = {field.name: parse(field.type, field.name, values[field.name]) for field in fields}
        decided = ParameterFields(**parsed)  # type: ignore[arg-type]
        # Before a plan is asked for: it would refuse in other words.
        for check in CHECKS:
            check(decided)
        for name in planned:
            parsed[name] = PLANNED[name](decided)
            decided = ParameterFields(**parsed)  # type: ignore[arg-type]
        return cls(**parsed)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for check in (*CHECKS, check_limits):
            check(self)
