"""The catalogue: what EC2 sizes offer and cost, each figure with its source.

python -m sizing catalogue --family g5            sizes of a family
python -m sizing catalogue --gpu L4 --fit train   by GPU and purpose
python -m sizing catalogue g5.xlarge              everything about one size, with its sources
"""

from __future__ import annotations

import argparse
import difflib
from dataclasses import asdict
from typing import Any

from sizing import catalogue
from sizing.catalogue import Instance
from sizing.commands.tables import print_json, show

HELP = "sizes, limits and prices, each with its source"
FITS = ("train", "serve", "prepare", "experiment", "graphics")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help="default: all that match")
    parser.add_argument("--family", help="only this family, such as g5")
    parser.add_argument("--gpu", help="only sizes whose accelerator's name contains this")
    parser.add_argument("--fit", choices=FITS, help="only families that suit this")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")


def run(arguments: argparse.Namespace) -> int:
    """Print the sizes that match."""
    chosen = select(arguments)
    if arguments.json:
        print_json([describe(instance) for instance in chosen])
    elif len(arguments.sizes) == 1:
        show([{"figure": k, "value": v} for k, v in describe(chosen[0]).items()])
    else:
        show([row(instance) for instance in chosen], notes=notes(chosen))
    return 0


def select(arguments: argparse.Namespace) -> list[Instance]:
    """The sizes asked for; what matches nothing is a ValueError that helps."""
    found = [catalogue.find(size) for size in arguments.sizes]
    found = found or list(catalogue.instances().values())
    if arguments.family:
        if arguments.family not in catalogue.families():
            raise ValueError(_unknown("family", arguments.family, list(catalogue.families())))
        found = [each for each in found if each.family == arguments.family]
    if arguments.gpu:
        names = sorted({each.gpu for each in catalogue.instances().values() if each.gpu})
        if not any(arguments.gpu.lower() in name.lower() for name in names):
            raise ValueError(_unknown("accelerator", arguments.gpu, names))
        found = [each for each in found if arguments.gpu.lower() in each.gpu.lower()]
    if arguments.fit:
        found = [e for e in found if arguments.fit in catalogue.families()[e.family].fit]
    if not found:
        raise ValueError("no size matches all of these options: leave one out")
    return found


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"no {what} {name!r} in the catalogue; {hint}"


def row(instance: Instance) -> dict[str, Any]:
    """One line of the table."""
    spot = _spot(instance)
    return {
        "size": instance.size,
        "vCPU": instance.vcpus,
        "GiB": instance.memory_gib,
        "accelerator": f"{instance.num_accelerators} x {instance.gpu}"
        if instance.num_accelerators
        else (f"part of {instance.gpu}" if instance.gpu else None),
        "MiB each": instance.gpu_memory_mib or None,
        "NVMe GB": instance.instance_store_gb or None,
        "EBS MB/s": _span(instance.ebs_baseline_mb_per_second, instance.ebs_max_mb_per_second),
        "net Gb/s": _span(instance.network_baseline_gbps, instance.network_peak_gbps)
        if instance.network_baseline_gbps
        else instance.network_label,
        "$/h": instance.on_demand_usd_per_hour,
        "Spot $/h": spot.usd_per_hour if spot else None,
        "Spot basis": spot.basis if spot else None,
    }


def _span(base: float, most: float) -> str:
    return f"{base:g}" if base == most else f"{base:g} to {most:g}"


def _spot(instance: Instance) -> catalogue.Price | None:
    """The Spot price, where there is a list price to speak of."""
    return catalogue.spot_price(instance.size) if instance.on_demand_usd_per_hour else None


def describe(instance: Instance) -> dict[str, Any]:
    """Everything known about one size, sources beside the figures."""
    family, spot = catalogue.families()[instance.family], _spot(instance)
    return {
        **asdict(instance),
        "kind": family.kind,
        "fit": sorted(family.fit),
        "family_is": family.what,
        "family_source": family.source,
        "spot_usd_per_hour": spot.usd_per_hour if spot else None,
        "spot_basis": spot.basis if spot else None,
        "spot_source": spot.source if spot else None,
    }


def notes(chosen: list[Instance]) -> list[str]:
    """Where the figures of the table are from, and what they mean."""
    return [
        f"{len(chosen)} sizes. Linux, {catalogue.PRICE_REGION}. `A to B`: baseline, and burst while"
        " credits last (EBS: 30 minutes in 24 hours).",
        *(f"source: {source}" for source in sorted({each.source for each in chosen})),
    ]
