"""The demo's receipt: what happened, what it cost, and whether anything but time was lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from contract.keys import GUARD, HEAD, RECEIPT
from rehearsal.drill.fleet import Life
from rehearsal.drill.interruptions import Drill, Interruption, steps_lost
from rehearsal.drill.lineage import Files, read_events, read_json, read_lineage, read_metrics
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


def make_receipt(rehearsed: Rehearsed) -> dict[str, Any]:
    """Compile the receipt from the stores of both runs and what was seen from outside."""
    ours, theirs = _receipt_of(rehearsed.run), _receipt_of(rehearsed.reference)
    lineage, reference = read_lineage(rehearsed.run), read_lineage(rehearsed.reference)
    resumes = [line for line in read_metrics(rehearsed.run) if line["kind"] == "resume"]
    gained = _gained_steps(rehearsed.run)
    interruptions = [_describe(each, resumes, gained) for each in rehearsed.drill.interruptions]
    notices = [item["notice_to_commit_seconds"] for item in interruptions if item["notice"]]
    lost = sum(item["steps_lost"] for item in interruptions)
    head = read_json(rehearsed.run, HEAD) or {}
    return {
        "resources": sum(rehearsed.resources.values()),
        "resources_by_type": dict(sorted(rehearsed.resources.items())),
        "dataset": _dataset(rehearsed.run),
        "workload": ours["workload"],
        "recipe": ours["recipe"],
        "steps": len(lineage.steps),
        "steps_computed": len(lineage.steps) + lost,
        "interruptions": len(interruptions),
        "interruption_list": interruptions,
        "notice_seconds": rehearsed.notice_seconds,
        "notice_to_commit_seconds": max(notices) if None not in notices and notices else None,
        "steps_lost": lost,
        "stages": ours["stages"],
        "validation_accuracy": ours.get("validation_accuracy"),
        "single_frame_accuracy": ours.get("single_frame_accuracy"),
        "baseline_accuracies": baselines_of(ours["stages"]),
        "weights_sha256": ours["weights_sha256"],
        "uninterrupted_weights_sha256": theirs["weights_sha256"],
        "numerics_key": ours["numerics_key"],
        "uninterrupted_numerics_key": theirs["numerics_key"],
        "losses_equal": lineage.losses() == reference.losses(),
        "lineage_problems": lineage.problems() + reference.problems(),
        "attempts": head["generation"],
        "fleet_target_capacity": rehearsed.target_capacity,
        "instances_running": sum(life.ended is None for life in rehearsed.lives),
        "processes_left": rehearsed.processes_left,
        "guard_invocations": len(rehearsed.guard),
        "guard_actions": [item["answer"] for item in rehearsed.guard],
        "guard_errors": [item["error"] for item in rehearsed.guard if item["error"]],
        **_cost(rehearsed.lives),
        "spent": _spent(rehearsed.run),
        "machines": _machines(rehearsed),
        "seconds": round(rehearsed.seconds, 1),
    }


def find_faults(receipt: Mapping[str, Any], expected_interruptions: int) -> list[str]:
    """List the promises that a receipt shows as broken; none after a good rehearsal."""
    lost_notice = [
        item["what"]
        for item in receipt["interruption_list"]
        if item["notice"] and item["notice_to_commit_seconds"] is None
    ]
    checks = {
        "the weights differ from the uninterrupted run's": receipt["weights_sha256"]
        != receipt["uninterrupted_weights_sha256"],
        "the losses differ from the uninterrupted run's": not receipt["losses_equal"],
        "the numerics keys differ; receipt.json has both": receipt["numerics_key"]
        != receipt["uninterrupted_numerics_key"],
        f"{receipt['interruptions']} interruptions happened, not {expected_interruptions}": (
            receipt["interruptions"] != expected_interruptions
        ),
        f"no commit was seen after {lost_notice}; did the run finish before it?": bool(lost_notice),
        f"the fleet's target is {receipt['fleet_target_capacity']}, not 0": (
            receipt["fleet_target_capacity"] != 0
        ),
        f"{receipt['instances_running']} instances are still running": receipt["instances_running"]
        > 0,
        f"{receipt['processes_left']} processes were left behind": receipt["processes_left"] > 0,
        "the Guard never ran": receipt["guard_invocations"] == 0,
        f"the Guard failed: {receipt['guard_errors'][:1]}": bool(receipt["guard_errors"]),
    }
    return [*receipt["lineage_problems"], *(text for text, broken in checks.items() if broken)]


def show_receipt(receipt: Mapping[str, Any], console: Console) -> None:
    """Print the receipt as a table."""
    table = Table(show_header=False, title="receipt", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in receipt_rows(receipt):
        table.add_row(name, value)
    console.print(table)


def receipt_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the receipt's rows as people read them: name and value."""
    data = receipt["dataset"]
    equal = (
        receipt["weights_sha256"] == receipt["uninterrupted_weights_sha256"]
        and receipt["losses_equal"]
    )
    commit = receipt["notice_to_commit_seconds"]
    gained = sum(item.get("gained_steps", 0) for item in receipt["interruption_list"])
    return [
        ("stack resources", f"{receipt['resources']} created, each checked by its own API"),
        (
            "dataset synced",
            f"{data['files']} files, {data['megabytes']:.1f} MB, "
            f"{data['megabytes_per_second']:.1f} MB/s",
        ),
        ("steps", f"{receipt['steps']} in the lineage, {receipt['steps_computed']} computed"),
        (
            "interruptions",
            f"{receipt['interruptions']}: "
            + "; ".join(item["what"] for item in receipt["interruption_list"]),
        ),
        (
            "notice to commit",
            f"{'never' if commit is None else f'{commit:.2f} s'} of {receipt['notice_seconds']:g} s"
            " (the demo's notice; EC2 gives 120 s)"
            + (f", then {gained} steps more, committed" if gained else ""),
        ),
        ("steps lost", f"{receipt['steps_lost']} (done again, never skipped)"),
        _result(receipt),
        (
            "cost, modelled",
            f"these {receipt['billed_seconds']:.0f} machine seconds at the prices of "
            f"{receipt['size']}: ${receipt['usd_on_demand']:.4f} on demand (list price), "
            f"${receipt['usd_spot']:.4f} on Spot ({receipt['spot_price_basis']})",
        ),
        ("spent by market", _spending(receipt["spent"])),
        ("fleet", f"target capacity {receipt['fleet_target_capacity']}"),
        (
            "left running",
            f"{receipt['instances_running']} instances, {receipt['processes_left']} processes",
        ),
        ("Guard", f"ran {receipt['guard_invocations']} times on the fleet's events"),
        ("weights", receipt["weights_sha256"]),
        ("uninterrupted", receipt["uninterrupted_weights_sha256"]),
        ("equal bit for bit", "yes, weights and losses" if equal else "NO"),
    ]


def _result(receipt: Mapping[str, Any]) -> tuple[str, str]:
    """The accuracy beside its baselines; else the last stage's first metric in each stage."""
    if (accuracy := receipt["validation_accuracy"]) is not None:
        baselines = receipt["baseline_accuracies"].items()
        others = "".join(f"; {name.replace('_', ' ')} {value:.3f}" for name, value in baselines)
        return "validation accuracy", f"{accuracy:.3f}{others}"
    stages = receipt["stages"]
    metric = next(iter(list(stages.values())[-1]))
    found = [f"{stage} {m[metric]:.4g}" for stage, m in stages.items() if metric in m]
    return f"validation {metric}", "; ".join(found)


def _receipt_of(run: Files) -> dict[str, Any]:
    receipt = read_json(run, RECEIPT)
    if receipt is None:
        raise ValueError("the run has no receipt.json: it did not finish")
    return receipt


def _gained_steps(run: Files) -> dict[str, int]:
    """Count, by machine, the steps done and committed after the first commit of its notice."""
    commits = [event for event in read_events(run) if "gained_steps" in event]
    return {event["instance_id"]: int(event["gained_steps"]) for event in commits}


def _describe(
    interruption: Interruption, resumes: Sequence[dict[str, Any]], gained: Mapping[str, int]
) -> dict[str, Any]:
    kind = "notice" if interruption.planned.notice else "kill without notice"
    seconds = interruption.notice_to_commit_seconds
    reached = interruption.noticed or interruption.progress
    unit = "shard" if reached.get("kind") == "prepare" else "step"
    number = reached.get("stage_step", reached.get("done"))
    return {
        "what": f"{kind} in {interruption.planned.stage} at {unit} {number}",
        "instance": interruption.life.instance.id,
        "notice": interruption.planned.notice,
        "notice_to_commit_seconds": None if seconds is None else round(seconds, 3),
        "gained_steps": gained.get(interruption.life.instance.id, 0),
        "steps_lost": steps_lost(interruption, resumes),
        "processes_killed": interruption.life.processes_killed,
    }


def baselines_of(stages: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the accuracies of the stages before the last one: the baselines of the result."""
    accuracies = [(name, m["accuracy"]) for name, m in stages.items() if "accuracy" in m]
    return dict(accuracies[:-1])


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
