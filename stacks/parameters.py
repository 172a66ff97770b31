"""Every decision of a deployment, made for one instance size and overridden by name from context.

The defaults stand in cdk.json; what depends on the size says "by-size" there. Unknown names and
impossible values are refused in one sentence. The table: python -m stacks.parameters g5.xlarge
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sizing import catalogue
from sizing.catalogue import Instance
from stacks import parameter_checks as checks

CDK_JSON = Path(__file__).parent.parent / "cdk.json"
BY_SIZE = "by-size"
BY_WORKLOAD = "by-workload"


@dataclass(frozen=True, kw_only=True, slots=True)
class StackParameters:
    """What both stacks are made from. Build it with `for_size` or `from_context`."""

    size: str
    workload: str
    recipe: str
    overrides: tuple[str, ...]
    run_id: str
    dataset: str
    dataset_bucket: str
    run_bucket: str
    zones: tuple[str, ...]
    pytorch_ami_parameter: str
    root_volume_gib: int
    data_volume_gib: int
    data_volume_iops: int
    data_volume_mib_per_second: int
    on_demand_base: int
    target_capacity: int
    checkpoint_interval: str
    notice_budget_seconds: int
    lease_ttl_seconds: int
    dataset_wait_seconds: int
    max_hours: float
    heartbeat_timeout_seconds: int
    max_barren_attempts: int

    @classmethod
    def for_size(cls, size: str, **overrides: object) -> StackParameters:
        """Return the parameters of `size` with cdk.json's defaults and the given overrides."""
        return cls.from_context({**defaults(), **overrides, "size": size})

    @classmethod
    def from_context(cls, context: Mapping[str, object]) -> StackParameters:
        """Return the parameters that CDK context spells; CDK's own keys in it are passed over."""
        given = {name: value for name, value in context.items() if not _is_cdks_own(name)}
        _refuse_unknown_names(given)
        values = {**defaults(), **given}
        size_name = _parse_text("size", values["size"])
        for name, decide in _DECIDED_LATER.items():
            if values[name] in (BY_SIZE, BY_WORKLOAD):
                values[name] = decide(catalogue.find(size_name), values)
        parsed = {
            field.name: _PARSERS[str(field.type)](field.name, values[field.name])
            for field in dataclasses.fields(cls)
        }
        return cls(**parsed)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        checks.check_names(self)
        checks.check_size(self)
        checks.check_volumes(self)
        checks.check_fleet(self)
        checks.check_times(self)

    @property
    def instance(self) -> Instance:
        """The catalogue's record of the size asked for."""
        return catalogue.find(self.size)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The size asked for and its alternates: every size that the fleet may start."""
        return (self.size, *(other.size for other in catalogue.alternates(self.size)))


def defaults() -> dict[str, object]:
    """Return cdk.json's context without CDK's feature flags."""
    context = json.loads(CDK_JSON.read_text(encoding="utf-8"))["context"]
    return {name: value for name, value in context.items() if not _is_cdks_own(name)}


def _is_cdks_own(name: str) -> bool:
    # Feature flags start with @, look-ups and CLI switches carry a colon; ours have neither.
    return name.startswith("@") or ":" in name


def _refuse_unknown_names(given: Mapping[str, object]) -> None:
    known = [field.name for field in dataclasses.fields(StackParameters)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"context {name!r} is unknown; {hint}")


def _dataset(_: Instance, values: Mapping[str, object]) -> object:
    return str(values["workload"]).rpartition(":")[2]


def _throughput(instance: Instance, _: Mapping[str, object]) -> object:
    sustained = int(instance.ebs_baseline_mb_per_second * 1e6 / 2**20)
    return min(max(sustained, checks.GP3_MIN_MIB_PER_SECOND), checks.GP3_MAX_MIB_PER_SECOND)


def _iops(_: Instance, values: Mapping[str, object]) -> object:
    # A dataset is read in large pieces: as many IOPS as the throughput needs, none to spare.
    throughput = _parse_int("data_volume_mib_per_second", values["data_volume_mib_per_second"])
    needed = throughput * checks.GP3_IOPS_PER_MIB_PER_SECOND
    return min(max(needed, checks.GP3_MIN_IOPS), checks.GP3_MAX_IOPS)


# In this order: the IOPS follow from the throughput.
_DECIDED_LATER = {
    "dataset": _dataset,
    "data_volume_mib_per_second": _throughput,
    "data_volume_iops": _iops,
}


def _parse_int(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value.strip()):
        return int(value)
    raise ValueError(f"{name} is {value!r}; give a whole number")


def _parse_float(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{name} is {value!r}; give a number")
    return number


def _parse_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; give a text")
    return value.strip()


def _parse_texts(name: str, value: object) -> tuple[str, ...]:
    # Overrides may hold commas (a=1,2), zones never do.
    separator = r"\s+" if name == "overrides" else r"[,\s]+"
    if isinstance(value, str):
        return tuple(re.split(separator, value.strip())) if value.strip() else ()
    if isinstance(value, list | tuple):
        return tuple(_parse_text(name, item) for item in value)
    raise ValueError(f"{name} is {value!r}; give texts separated by spaces")


_PARSERS = {
    "str": _parse_text,
    "int": _parse_int,
    "float": _parse_float,
    "tuple[str, ...]": _parse_texts,
}


def table(size: str) -> str:
    """Return the parameters of `size`, one a line, with where each value comes from."""
    parameters = StackParameters.for_size(size)
    given = defaults()
    lines = []
    for field in dataclasses.fields(parameters):
        value = getattr(parameters, field.name)
        shown = " ".join(value) if isinstance(value, tuple) else str(value)
        origin = "cdk.json" if field.name != "size" else "asked for"
        if given[field.name] in (BY_SIZE, BY_WORKLOAD):
            origin = str(given[field.name])
        lines.append(f"{field.name:<28}{shown or '-':<104}{origin}")
    alternates = " ".join(parameters.sizes[1:]) or "-"
    lines.append(f"{'alternates':<28}{alternates:<104}sizing/instances.csv")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table of one size; the exit code is 2 for a user's mistake."""
    if len(arguments) != 1:
        print("usage: python -m stacks.parameters SIZE", file=sys.stderr)
        return 2
    try:
        print(table(arguments[0]))
    except ValueError as mistake:
        print(f"parameters: {mistake}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
