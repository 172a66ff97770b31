"""All parameters of a deployment: decided for one instance size, overridden by name from context.

cdk.json has the defaults, with "by-size" for what depends on the size. Unknown names and
impossible values are refused in one sentence. Tables: python -m stacks.parameters --help
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sizing import catalogue
from stacks.parameters import checks
from stacks.parameters.context import (
    LEFT_OPEN,
    defaults,
    parse,
    parse_text,
    refuse_unknown_names,
    without_cdk_keys,
)
from stacks.parameters.decisions import DECISIONS
from stacks.parameters.fields import ParameterFields


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
        given = without_cdk_keys(context)
        fields = dataclasses.fields(cls)
        refuse_unknown_names(given, [field.name for field in fields])
        values = {**defaults(), **given}
        instance = catalogue.find(parse_text("size", values["size"]))
        for name, decide in DECISIONS.items():
            if values[name] in LEFT_OPEN:
                values[name] = decide(instance, values)
        parsed = {field.name: parse(field.type, field.name, values[field.name]) for field in fields}
        return cls(**parsed)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        checks.check_names(self)
        checks.check_size(self)
        checks.check_volumes(self)
        checks.check_fleet(self)
        checks.check_times(self)
        checks.check_alarms(self)
        checks.check_kept(self)
        checks.check_review(self)
