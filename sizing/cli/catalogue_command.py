"""List EC2 sizes, limits and prices, each figure with its source.

python -m sizing catalogue --family g5            sizes of a family
python -m sizing catalogue --gpu L4 --fit train   by GPU and purpose
python -m sizing catalogue g5.xlarge              everything about one size, with its sources
python -m sizing catalogue --region eu-west-1     prices of another region
python -m sizing catalogue --families             what each family is for, and its cost level

The level is that of the family's cheapest size: Low under $0.05 an hour, Moderate under $0.50, High
under $2, Very High above.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, date, datetime
from typing import Any, TypeAlias

from contract.aws_errors import checked, settings_checked
from contract.suggestion import suggest
from sizing import catalogue
from sizing.catalogue import InstanceType, Price
from sizing.catalogue.facts import Fact, facts
from sizing.catalogue.prices import SNAPSHOT_FILE, age_note, import_skypilot, snapshot, write
from sizing.catalogue.refresh import PriceBook, Refreshed, load, refresh, save
from sizing.catalogue.sizes import Family, families
from sizing.cli.shared_options import (
    FILE,
    FLAG,
    Options,
    add_options,
    add_price_arguments,
    price_book,
)
from sizing.cli.tables import print_json, show_table
from sizing.spot.interruptions import interruptions

HELP = "sizes, limits and prices, each with its source"
# On demand and on Spot, where known.
Costs: TypeAlias = tuple[Price | None, Price | None]
FITS = ("train", "serve", "prepare", "experiment", "graphics")


_OPTIONS: Options = {
    "--facts": (FLAG, "list facts that go stale, with age, source and how to renew them, instead"),
    "--families": (FLAG, "list families with their use and cost instead"),
    "--family": ({}, "only this family, such as g5"),
    "--gpu": ({}, "only sizes whose accelerator name contains this"),
    "--fit": ({"choices": FITS, "metavar": "PURPOSE"}, f"only families for {', '.join(FITS)}"),
    "--refresh": (FLAG, "ask AWS for prices, scores and quotas"),
}
_SNAPSHOT: Options = {
    "--import-snapshot": (
        FILE,
        "take all prices from SkyPilot's aws/vms.csv, the newest version; to be committed",
    ),
    "--date": ({"metavar": "DAY"}, "the day of --import-snapshot's prices"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help="default: all that match")
    add_options(parser, _OPTIONS)
    add_price_arguments(parser)
    add_options(parser, _SNAPSHOT)


def run(arguments: argparse.Namespace) -> int:
    """Print the sizes that match."""
    if arguments.import_snapshot is not None:
        return import_snapshot(arguments)
    if what := "facts" if arguments.facts else "families" if arguments.families else "":
        filters = ("sizes", "family", "gpu", "fit")
        if given := [name for name in filters if getattr(arguments, name)]:
            raise ValueError(f"--{what} lists all of them; leave out {', '.join(given)}")
        rows = family_rows() if what == "families" else list(map(fact_row, facts().values()))
        if arguments.json:
            print_json("catalogue", {what: rows})
        else:
            show_table(rows, notes=["list prices on demand, us-east-1"] * (what == "families"))
        return 0
    chosen = select(arguments)
    book = asked_of_aws(arguments, [instance.size for instance in chosen])
    answers, costs = book.answers, {each.size: book.find(each.size) for each in chosen}
    if arguments.json:
        sizes = [describe(each, costs[each.size], answers, arguments.region) for each in chosen]
        print_json("catalogue", {"region": arguments.region, "sizes": sizes})
    elif len(arguments.sizes) == 1:
        figures = describe(chosen[0], costs[chosen[0].size], answers, arguments.region).items()
        show_table(
            [{"figure": name, "value": _plain(value)} for name, value in figures],
            notes=[age_note(costs[chosen[0].size])],
        )
    else:
        rows = [row(each, costs[each.size]) for each in chosen]
        show_table(rows, notes=notes(chosen, costs, answers, arguments.region))
    for problem in answers.problems if answers and arguments.refresh else ():
        print(f"not refreshed: {problem}", file=sys.stderr)
    return 0


def fact_row(fact: Fact) -> dict[str, Any]:
    """Return a fact that goes stale, with its age."""
    days = (datetime.now(UTC).date() - fact.day).days
    age = f"{days} days" + (", OLD" if days > fact.good_days else "")
    return {"fact": fact.name, "day": str(fact.day), "age": age, "source": fact.source,
            "renewed by": fact.renew}  # fmt: skip


def asked_of_aws(arguments: argparse.Namespace, sizes: list[str]) -> PriceBook:
    """Return the prices, with AWS's answers refreshed if requested."""
    if not arguments.refresh:
        return price_book(arguments)
    # Slow to import, and only needed here.
    import boto3

    with settings_checked():
        session = checked(boto3.Session())
    answers = refresh(
        sizes,
        session=session,
        region=arguments.region,
        earlier=load(arguments.region),
        now=datetime.now(UTC),
    )
    save(answers)
    return price_book(arguments)


def import_snapshot(arguments: argparse.Namespace) -> int:
    """Replace the catalogue's snapshot with the prices of SkyPilot's file."""
    if arguments.date is None:
        raise ValueError("--import-snapshot needs --date, the day of the file's prices")
    try:
        day = date.fromisoformat(arguments.date)
    except ValueError:
        raise ValueError(f"--date takes a day such as 2026-07-01, got {arguments.date!r}") from None
    source = "skypilot-org/skypilot-catalog aws/vms.csv"
    found = import_skypilot(arguments.import_snapshot, day=day, source=source)
    write(found, SNAPSHOT_FILE)
    sizes = {size for size, _ in found.offers}
    print(f"{len(sizes)} sizes in {len(found.regions)} regions -> {SNAPSHOT_FILE}")
    if unpriced := [size for size in catalogue.instances() if size not in sizes]:
        print(f"no price in it: {', '.join(unpriced)}")
    return 0


def _plain(value: Any) -> Any:
    """Turn a list or mapping into the text of one cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {figure:g}" for name, figure in value.items())
    return ", ".join(value) if isinstance(value, list) else value


def select(arguments: argparse.Namespace) -> list[InstanceType]:
    """Return the requested sizes; a ValueError if none match."""
    found = [catalogue.find(size) for size in arguments.sizes]
    found = found or list(catalogue.instances().values())
    if arguments.family:
        if arguments.family not in families():
            raise ValueError(_unknown("family", arguments.family, list(families())))
        found = [each for each in found if each.family == arguments.family]
    if arguments.gpu:
        names = sorted({each.gpu for each in catalogue.instances().values() if each.gpu})
        if not any(arguments.gpu.lower() in name.lower() for name in names):
            raise ValueError(_unknown("accelerator", arguments.gpu, names))
        found = [each for each in found if arguments.gpu.lower() in each.gpu.lower()]
    if arguments.fit:
        found = [e for e in found if arguments.fit in families()[e.family].fit]
    if not found:
        raise ValueError("no size matches all of these options; leave one out")
    return found


def _unknown(what: str, name: str, known: list[str]) -> str:
    return f"no {what} {name!r} in the catalogue; {suggest(name, known, most=3, cutoff=0.4)}"


def row(instance: InstanceType, cost: Costs) -> dict[str, Any]:
    """Return one row of the table."""
    on_demand, spot = cost
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


def describe(
    instance: InstanceType, cost: Costs, answers: Refreshed | None, region: str
) -> dict[str, Any]:
    """Return everything known about one size, with sources."""
    family = families()[instance.family]
    on_demand, spot = cost
    known = asdict(instance)
    del known["on_demand_usd_per_hour"]
    planned = interruptions()
    asked = answers.spot.get(instance.size) if answers else None
    seen = snapshot().offers.get((instance.size, region))
    quota = answers.quotas.get(instance.quota_code) if answers else None
    return {
        **known,
        "kind": family.kind,
        "fit": sorted(family.fit),
        "family_is": family.what,
        "family_source": family.source,
        **_price("on_demand", on_demand),
        **_price("spot", spot),
        "spot_usd_per_hour_by_zone": asked["value"]
        if asked
        else (dict(seen.spot_usd_per_hour) if seen else None),
        "spot_quota_vcpus": quota["value"] if quota else None,
        "planned_interruptions_per_machine_hour": planned.rate_per_hour,
        "planned_wait_seconds": planned.wait_seconds,
        "interruptions_source": planned.source,
    }


def _price(market: str, price: Price | None) -> dict[str, Any]:
    return {
        f"{market}_usd_per_hour": price.usd_per_hour if price else None,
        f"{market}_basis": price.basis if price else None,
        f"{market}_source": price.source if price else None,
        f"{market}_day": price.day.isoformat() if price and price.day else None,
    }


def notes(
    chosen: list[InstanceType], costs: Mapping[str, Costs], answers: Refreshed | None, region: str
) -> list[str]:
    """Return the sources and the meaning of the table's figures."""
    lines = [
        f"{len(chosen)} sizes. Linux, {region}. `A-B`: baseline, and burst while credits last"
        " (EBS: 30 minutes in 24 hours).",
        age_note(price for cost in costs.values() for price in cost),
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


# The cheapest size of a family costs less than this an hour.
_LEVELS = ((0.05, "Low"), (0.5, "Moderate"), (2.0, "High"))
_HIGHEST = "Very High"


def family_rows() -> list[dict[str, Any]]:
    """Return all families, cheapest first; those without a price come last.

    Dollars are those of the cheapest and the most expensive size, in us-east-1.
    """
    found = [_row(family) for family in families().values()]
    return sorted(
        found, key=lambda row: (row["usd_per_hour_from"] is None, row["usd_per_hour_from"] or 0.0)
    )


def _row(family: Family) -> dict[str, Any]:
    of_family = [i for i in catalogue.instances().values() if i.family == family.name]
    prices = [i.on_demand_usd_per_hour for i in of_family if i.on_demand_usd_per_hour]
    least = min(prices, default=None)
    level = "unknown"
    if least is not None:
        level = next((word for limit, word in _LEVELS if least < limit), _HIGHEST)
    cpu = family.kind in ("cpu", "burstable")
    return {
        "family": family.name,
        "compute": "CPU" if cpu else next((i.gpu for i in of_family if i.gpu), "-"),
        "fit": sorted(family.fit),
        "cost_level": level,
        "usd_per_hour_from": least,
        "usd_per_hour_to": max(prices, default=None),
        "use": family.what,
    }
