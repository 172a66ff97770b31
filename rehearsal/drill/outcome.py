"""How a rehearsal ended, whatever it trained: facts, faults and rows that every receipt has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from contract.keys import GUARD, RECEIPT
from rehearsal.drill.fleet import Life, user_data_faults
from rehearsal.drill.interruptions import Drill
from rehearsal.drill.lineage import Files, read_events, read_json
from sizing import catalogue


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """Everything that goes into a receipt."""

    run: Files
    reference: Files
    lives: Sequence[Life]
    drill: Drill
    resources: Mapping[str, int]
    target_capacity: int
    processes_left: int
    guard: Sequence[Mapping[str, Any]]
    notice_seconds: float
    seconds: float


def common_facts(rehearsed: Rehearsed, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every rehearsal's receipt has; `ours` is the run's own."""
    return {
        "resources": sum(rehearsed.resources.values()),
        "resources_by_type": dict(sorted(rehearsed.resources.items())),
        "dataset": _dataset(rehearsed.run),
        "workload": ours["workload"],
        "recipe": ours["recipe"],
        "interruptions": len(rehearsed.drill.interruptions),
        "notice_seconds": rehearsed.notice_seconds,
        "fleet_target_capacity": rehearsed.target_capacity,
        "instances_running": sum(life.ended is None for life in rehearsed.lives),
        "processes_left": rehearsed.processes_left,
        "user_data_faults": user_data_faults(rehearsed.lives),
        "guard_invocations": len(rehearsed.guard),
        "guard_actions": [item["answer"] for item in rehearsed.guard],
        "guard_errors": [item["error"] for item in rehearsed.guard if item["error"]],
        **_cost(rehearsed.lives),
        "spent": _spent(rehearsed.run),
        "machines": _machines(rehearsed),
        "seconds": round(rehearsed.seconds, 1),
    }


def common_faults(receipt: Mapping[str, Any], expected_interruptions: int) -> list[str]:
    """List what no rehearsal may leave behind or leave out."""
    checks = {
        f"{receipt['interruptions']} interruptions happened, not {expected_interruptions}": (
            receipt["interruptions"] != expected_interruptions
        ),
        f"the fleet's target is {receipt['fleet_target_capacity']}, not 0": (
            receipt["fleet_target_capacity"] != 0
        ),
        f"{receipt['instances_running']} instances are still running": receipt["instances_running"]
        > 0,
        f"{receipt['processes_left']} processes were left behind": receipt["processes_left"] > 0,
        "the Guard never ran": receipt["guard_invocations"] == 0,
        f"the Guard failed: {receipt['guard_errors'][:1]}": bool(receipt["guard_errors"]),
    }
    broken = [text for text, is_broken in checks.items() if is_broken]
    return [*receipt["user_data_faults"], *broken]


def start_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of what was there before the first step."""
    data = receipt["dataset"]
    return [
        ("stack resources", f"{receipt['resources']} created, each checked by its own API"),
        (
            "dataset synced",
            f"{data['files']} files, {data['megabytes']:.1f} MB, "
            f"{data['megabytes_per_second']:.1f} MB/s",
        ),
    ]


def cost_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of what it cost."""
    return [
        (
            "cost, modelled",
            f"these {receipt['billed_seconds']:.0f} machine seconds at the prices of "
            f"{receipt['size']}: ${receipt['usd_on_demand']:.4f} on demand (list price), "
            f"${receipt['usd_spot']:.4f} on Spot ({receipt['spot_price_basis']})",
        ),
        ("spent by market", _spending(receipt["spent"])),
    ]


def end_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of what was left running."""
    return [
        ("fleet", f"target capacity {receipt['fleet_target_capacity']}"),
        (
            "left running",
            f"{receipt['instances_running']} instances, {receipt['processes_left']} processes",
        ),
        ("Guard", f"ran {receipt['guard_invocations']} times on the fleet's events"),
    ]


def show_receipt(rows: Sequence[tuple[str, str]], console: Console) -> None:
    """Print the receipt's rows as a table."""
    table = Table(show_header=False, title="receipt", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def read_receipt(run: Files) -> dict[str, Any]:
    """Return the finished run's own receipt."""
    receipt = read_json(run, RECEIPT)
    if receipt is None:
        raise ValueError("the run has no receipt.json: it did not finish")
    return receipt


def _dataset(run: Files) -> dict[str, float]:
    synced = [event for event in read_events(run) if event["name"] == "dataset-synced"]
    if not synced:
        raise ValueError("no machine reported a synced dataset")
    first = synced[0]
    megabytes = first["bytes"] / 1e6
    return {
        "files": first["files"],
        "megabytes": round(megabytes, 3),
        "seconds": round(first["seconds"], 3),
        "megabytes_per_second": round(megabytes / max(first["seconds"], 1e-3), 1),
    }


def _cost(lives: Sequence[Life]) -> dict[str, Any]:
    on_demand = spot = seconds = 0.0
    for life in lives:
        size, hours = life.instance.type, life.seconds / 3600
        seconds += life.seconds
        on_demand += hours * catalogue.hourly_price(size).usd_per_hour
        spot += hours * catalogue.spot_price(size).usd_per_hour
    size = lives[0].instance.type
    return {
        "size": size,
        "billed_seconds": round(seconds, 1),
        "usd_on_demand": round(on_demand, 6),
        "usd_spot": round(spot, 6),
        "spot_price_basis": catalogue.spot_price(size).basis,
        "spot_price_source": catalogue.spot_price(size).source,
    }


def _spent(run: Files) -> dict[str, Any]:
    """Return what the Guard counted by market, and how often it changed the market."""
    guard = read_json(run, GUARD) or {}
    billed = guard.get("billed", {})
    return {"by_market": billed, "moves": guard.get("market", {}).get("moves", 0)}


def _spending(spent: Mapping[str, Any]) -> str:
    """Return dollars by market, as the Guard counted them at its last call, and the fallback."""
    markets = "; ".join(
        f"{market} ${each['usd']:.4f} for {each['hours'] * 3600:.0f} s"
        for market, each in spent["by_market"].items()
    )
    moves = spent["moves"]
    fallback = f"fallback: {moves} moves between markets" if moves else "fallback: none"
    return f"{markets or 'nothing counted'}; {fallback} (the Guard's count, at modelled prices)"


def _machines(rehearsed: Rehearsed) -> list[dict[str, Any]]:
    boots: dict[str, dict[str, float]] = {}
    for event in read_events(rehearsed.run):
        if event["name"].startswith("boot") and "seconds" in event:
            name = event["name"].removeprefix("boot-")
            boots.setdefault(event["instance_id"], {})[name] = event["seconds"]
    first = rehearsed.lives[0].started
    return [
        {
            "instance": life.instance.id,
            "size": life.instance.type,
            "at": round(life.started - first, 1),
            "seconds": round(life.seconds, 1),
            "ended": life.reason,
            "processes_killed": life.processes_killed,
            "boot": boots.get(life.instance.id, {}),
            "seconds_to_first_progress": rehearsed.drill.first_progress.get(life.instance.id),
            "seconds_to_first_step": rehearsed.drill.first_step.get(life.instance.id),
        }
        for life in rehearsed.lives
    ]
