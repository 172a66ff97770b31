"""List EC2 sizes, limits and prices, each figure with its source.

python -m sizing catalogue --family g5            sizes of a family
python -m sizing catalogue --gpu L4 --fit train   by GPU and purpose
python -m sizing catalogue g5.xlarge              everything about one size, with its sources
"""

import argparse
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sizing import catalogue
from sizing.catalogue import PRICE_REGION, Instance
from sizing.catalogue.refresh import (
    CACHE_FOLDER,
    Refreshed,
    cache_file,
    describe_age,
    load,
    prices,
    refresh,
    save,
)
from sizing.cli.tables import print_json, show
from sizing.spot.interruptions import has_advisor_figure, interruptions
from sizing.suggestion import suggest

HELP = "sizes, limits and prices, each with its source"
FITS = ("train", "serve", "prepare", "experiment", "graphics")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help="default: all that match")
    parser.add_argument("--family", help="only this family, such as g5")
    parser.add_argument("--gpu", help="only sizes whose accelerator name contains this")
    parser.add_argument(
        "--fit", choices=FITS, metavar="PURPOSE", help=f"only families for {', '.join(FITS)}"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="ask AWS for prices, scores and quotas"
    )
    parser.add_argument(
        "--region", default=PRICE_REGION, help="for --refresh (default: %(default)s)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FILE",
        help=f"AWS's answers (default: {CACHE_FOLDER}/REGION.json)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the sizes that match."""
    chosen = select(arguments)
    answers = answers_of_aws(arguments, [instance.size for instance in chosen])
    if arguments.json:
        print_json("catalogue", {"sizes": [describe(instance, answers) for instance in chosen]})
    elif len(arguments.sizes) == 1:
        figures = describe(chosen[0], answers).items()
        show([{"figure": name, "value": _plain(value)} for name, value in figures])
    else:
        rows = [row(instance, answers) for instance in chosen]
        show(rows, notes=notes(chosen, answers, arguments.region))
    for problem in answers.problems if answers and arguments.refresh else ():
        print(f"not refreshed: {problem}", file=sys.stderr)
    return 0


def answers_of_aws(arguments: argparse.Namespace, sizes: list[str]) -> Refreshed | None:
    """Return AWS's saved answers, refreshed if asked for."""
    path = arguments.cache or cache_file(arguments.region)
    answers = load(path)
    if answers and answers.region != arguments.region:
        raise ValueError(f"{path} has answers of {answers.region}, not {arguments.region}")
    if arguments.refresh:
        # Slow to import, and only needed here.
        import boto3

        answers = refresh(
            sizes,
            session=boto3.Session(),
            region=arguments.region,
            earlier=answers,
            now=datetime.now(UTC),
        )
        save(answers, path)
    elif answers is None and arguments.region != PRICE_REGION:
        raise ValueError(
            f"the catalogue's prices are for {PRICE_REGION}; for {arguments.region} give --refresh"
        )
    return answers


def _plain(value: Any) -> Any:
    """Turn a list or mapping into the text of one cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {figure:g}" for name, figure in value.items())
    return ", ".join(value) if isinstance(value, list) else value


def select(arguments: argparse.Namespace) -> list[Instance]:
    """Return the sizes asked for; a ValueError if none match."""
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
    return f"no {what} {name!r} in the catalogue; {suggest(name, known, most=3, cutoff=0.4)}"


def row(instance: Instance, answers: Refreshed | None) -> dict[str, Any]:
    """Return one row of the table."""
    on_demand, spot = prices(instance.size, answers)
    return {
        "size": instance.size,
        "vCPU": instance.vcpus,
        "GiB": instance.memory_gib,
        "accelerator": f"{instance.num_accelerators} x {instance.gpu.removeprefix('NVIDIA ')}"
        if instance.num_accelerators
        else (f"part of {instance.gpu}" if instance.gpu else None),
        "MiB each": instance.gpu_memory_mib or None,
        "NVMe GB": instance.instance_store_gb or None,
        "EBS MB/s": _span(instance.ebs_baseline_mb_per_second, instance.ebs_max_mb_per_second),
        "net Gb/s": _span(instance.network_baseline_gbps, instance.network_peak_gbps)
        if instance.network_baseline_gbps
        else instance.network_label,
        "$/h": on_demand.usd_per_hour if on_demand else None,
        "Spot $/h": spot.usd_per_hour if spot else None,
        "Spot basis": spot.basis if spot else None,
    }


def _span(base: float, most: float) -> str:
    return f"{base:g}" if base == most else f"{base:g}-{most:g}"


def describe(instance: Instance, answers: Refreshed | None) -> dict[str, Any]:
    """Return everything known about one size, with sources."""
    family = catalogue.families()[instance.family]
    on_demand, spot = prices(instance.size, answers)
    known = asdict(instance)
    del known["on_demand_usd_per_hour"]
    planned = interruptions(instance.size)
    advisor = (
        interruptions(instance.size, basis="advisor").source
        if has_advisor_figure(instance.size)
        else None
    )
    zones = answers.spot.get(instance.size) if answers else None
    quota = answers.quotas.get(instance.spot_quota_code) if answers else None
    return {
        **known,
        "kind": family.kind,
        "fit": sorted(family.fit),
        "family_is": family.what,
        "family_source": family.source,
        "on_demand_usd_per_hour": on_demand.usd_per_hour if on_demand else None,
        "on_demand_basis": on_demand.basis if on_demand else None,
        "on_demand_source": on_demand.source if on_demand else None,
        "spot_usd_per_hour": spot.usd_per_hour if spot else None,
        "spot_basis": spot.basis if spot else None,
        "spot_source": spot.source if spot else None,
        "spot_usd_per_hour_by_zone": zones["value"] if zones else None,
        "spot_quota_vcpus": quota["value"] if quota else None,
        "planned_interruptions_per_machine_hour": planned.rate_per_hour,
        "planned_wait_seconds": planned.wait_seconds,
        "interruptions_source": planned.source,
        "taken_back_by_aws": advisor,
    }


def notes(chosen: list[Instance], answers: Refreshed | None, region: str) -> list[str]:
    """Return where the figures of the table are from, and what they mean."""
    lines = [
        f"{len(chosen)} sizes. Linux, {region}. `A-B`: baseline, and burst while credits last"
        " (EBS: 30 minutes in 24 hours).",
        describe_age(answers, [each.size for each in chosen], datetime.now(UTC)),
    ]
    if answers:
        lines += [
            f"Spot placement score {zone}: {answer['value']['score']} of 10 for one of "
            f"{', '.join(answer['value']['sizes'])} ({answer['at'][:10]}; not a promise)"
            for zone, answer in answers.scores.items()
        ]
        lines += [
            f"Spot quota {code}: {answer['value']:g} vCPUs ({answer['at'][:10]})"
            for code, answer in answers.quotas.items()
        ]
    return [*lines, *(f"source: {source}" for source in sorted({each.source for each in chosen}))]
