"""The stack parameters as tables: one size with the origin of each value, or several compared.

Run: python -m stacks.parameters g5.xlarge [-c NAME=VALUE] [--json]
     python -m stacks.parameters --compare [SIZE ...] [--json]
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from sizing import catalogue
from stacks.parameters import StackParameters
from stacks.parameters.context import LEFT_OPEN, defaults
from stacks.parameters.decisions import DECISIONS
from stacks.parameters.limits import PLANNED

# The families that --compare shows when no size is given.
FAMILIES = ("g4dn", "g5", "g6", "g6e")


def explain(size: str, given: Mapping[str, str]) -> list[dict[str, object]]:
    """Return name, value and origin of every parameter of `size`, and of its alternates."""
    parameters = StackParameters.for_size(size, **given)
    rows: list[dict[str, object]] = []
    for field in dataclasses.fields(parameters):
        value, default = getattr(parameters, field.name), defaults()[field.name]
        origin = "cdk.json"
        if field.name == "size" or field.name in {name.partition(".")[0] for name in given}:
            origin = "requested"
        elif parameters.program and field.name in ("workload", "recipe"):
            origin = "what runs a program"
        elif default in LEFT_OPEN:
            origin = f"{default}: {_reason(field.name)}"
        rows.append({"name": field.name, "value": value, "origin": origin})
    alternates = "sizing/catalogue/instances.csv: same GPUs, at least the memory, four cheapest"
    if parameters.mix_gpus:
        alternates = (
            "sizing/catalogue/instances.csv: same number of GPUs, any model, at least the memory"
        )
    rows.append({"name": "alternates", "value": parameters.sizes[1:], "origin": alternates})
    return rows


def _reason(name: str) -> str:
    """Return the reason for the decided value of a parameter."""
    return ({**DECISIONS, **PLANNED}[name].__doc__ or "").strip()


def compare(sizes: Sequence[str], given: Mapping[str, str]) -> list[dict[str, object]]:
    """Return one row per size, with a column for each parameter that differs between them."""
    every = [StackParameters.for_size(size, **given) for size in sizes]
    differing = [
        field.name
        for field in dataclasses.fields(StackParameters)
        if len({getattr(each, field.name) for each in every}) > 1 or field.name == "size"
    ]
    rows = []
    for each in every:
        instance = each.instance
        row: dict[str, object] = {name: getattr(each, name) for name in differing}
        row |= {
            "gpus": f"{instance.num_gpus} x {instance.gpu.removeprefix('NVIDIA ')}",
            "vcpus": instance.vcpus,
            "ebs_sustained_mb_per_second": instance.ebs_baseline_mb_per_second,
            "usd_per_hour": instance.on_demand_usd_per_hour,
            "alternates": each.sizes[1:],
        }
        rows.append(row)
    return rows


def deployable_sizes(families: Sequence[str]) -> list[str]:
    """Return every deployable size of the families, in the catalogue's order."""
    return [
        size
        for size, instance in catalogue.instances().items()
        if instance.family in families
        and instance.is_trainable
        and instance.on_demand_usd_per_hour is not None
    ]


def _show(rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(*rows[0], box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    # A table piped into a file has no width of its own; this one cuts nothing off.
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    console.print(table)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        texts = (each if isinstance(each, str) else "=".join(each) for each in value)
        return " ".join(texts) or "-"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value not in ("", None) else "-"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stacks.parameters", description=__doc__)
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help="default: cdk.json's")
    parser.add_argument("-c", "--context", action="append", default=[], metavar="NAME=VALUE")
    families = ", ".join(FAMILIES)
    parser.add_argument(
        "--compare",
        action="store_true",
        help=f"show what differs by size; without SIZE: {families}",
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print one of the two tables; the exit code is 2 for a user's mistake."""
    options = _parse(arguments)
    given = dict(pair.partition("=")[::2] for pair in options.context)
    try:
        if options.compare:
            rows = compare(options.sizes or deployable_sizes(FAMILIES), given)
        elif len(options.sizes) > 1:
            raise ValueError("got several sizes; to compare them, add --compare")
        else:
            size = [*options.sizes, given.pop("size", str(defaults()["size"]))][0]
            rows = explain(size, given)
    except ValueError as mistake:
        print(f"parameters: {mistake}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
