"""The receipt of a program's demo: what its interruptions cost, and how its result differs.

Nothing is promised of equal bits: what a program does after a restart is its own affair.
"""

from collections.abc import Mapping
from typing import Any

from contract.keys import HEAD
from rehearsal.drill.interruptions import Interruption
from rehearsal.drill.lineage import Files, read_json, read_metrics
from rehearsal.drill.outcome import (
    Rehearsed,
    common_facts,
    common_faults,
    cost_rows,
    end_rows,
    read_receipt,
    start_rows,
)


def make_program_receipt(rehearsed: Rehearsed) -> dict[str, Any]:
    """Compile the receipt from the stores of both runs and what was seen from outside."""
    ours, theirs = read_receipt(rehearsed.run), read_receipt(rehearsed.reference)
    head = read_json(rehearsed.run, HEAD) or {}
    costs = {cost["generation"]: cost for cost in ours["interruptions"]}
    return {
        **common_facts(rehearsed, ours),
        "program": ours["program"],
        "steps": ours["steps"],
        "steps_redone": ours["steps_redone"],
        "seconds_lost": ours["seconds_lost"],
        "snapshots": ours["snapshots"],
        "attempts": head["generation"],
        "interruption_list": [_describe(each, costs) for each in rehearsed.drill.interruptions],
        "last_metrics": ours["stages"]["program"],
        "uninterrupted_last_metrics": theirs["stages"]["program"],
        "losses": _losses(rehearsed.run),
        "uninterrupted_losses": _losses(rehearsed.reference),
        "final_files": ours["final_files"],
        "uninterrupted_final_files": theirs["final_files"],
    }


def program_faults(receipt: Mapping[str, Any], expected_interruptions: int) -> list[str]:
    """List what a good rehearsal of a program never shows."""
    names, others = receipt["final_files"].keys(), receipt["uninterrupted_final_files"].keys()
    faults = common_faults(receipt, expected_interruptions)
    if not names or names != others:
        faults.append(
            f"the run left {sorted(names)} in its model folder, the uninterrupted {sorted(others)}"
        )
    if receipt["attempts"] != receipt["interruptions"] + 1:
        faults.append(
            f"{receipt['attempts']} attempts for {receipt['interruptions']} interruptions: one "
            "failed, or the run ended before an interruption"
        )
    return faults


def program_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the receipt's rows as people read them: name and value."""
    redone = receipt["steps_redone"]
    equal = receipt["final_files"] == receipt["uninterrupted_final_files"]
    return [
        *start_rows(receipt),
        ("program", f"{receipt['program']}, in {receipt['attempts']} attempts"),
        (
            "interruptions",
            f"{receipt['interruptions']}: "
            + "; ".join(item["what"] for item in receipt["interruption_list"]),
        ),
        (
            "steps",
            f"{receipt['steps']} in the run"
            + ("" if redone is None else f", {redone} of them done again"),
        ),
        ("time lost", f"{receipt['seconds_lost']:.1f} s, since what the last snapshots hold"),
        ("snapshots", f"{receipt['snapshots']} of its checkpoint folder"),
        ("last metrics", _figures(receipt["last_metrics"])),
        ("uninterrupted", _figures(receipt["uninterrupted_last_metrics"])),
        *cost_rows(receipt),
        *end_rows(receipt),
        ("model", ", ".join(receipt["final_files"])),
        (
            "equal bit for bit",
            "yes"
            if equal
            else "no: this program goes on otherwise than it would have without interruption; a "
            "workload does not (docs/your-program.md)",
        ),
    ]


def _describe(interruption: Interruption, costs: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    kind = "notice" if interruption.planned.notice else "kill without notice"
    reached = interruption.noticed or interruption.progress
    cost = costs.get(int(reached.get("generation", 0)), {})
    redone = cost.get("steps_redone")
    # A program that names no steps has a snapshot's number there.
    what = kind
    if redone is not None:
        what += f" at step {reached.get('step', 0)}, {redone} steps done again"
    seconds = interruption.notice_to_commit_seconds
    return {
        "what": what,
        "instance": interruption.life.instance.id,
        "notice": interruption.planned.notice,
        "notice_to_commit_seconds": None if seconds is None else round(seconds, 3),
        "steps_redone": redone,
        "seconds_lost": cost.get("seconds_lost"),
        "processes_killed": interruption.life.processes_killed,
    }


def _losses(run: Files) -> list[dict[str, Any]]:
    """Return every attempt's losses in order of time, for the chart."""
    return [
        {"step": line["step"], "loss": line["loss"], "generation": line["generation"]}
        for line in read_metrics(run)
        if line["kind"] == "step" and "loss" in line
    ]


def _figures(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or "none reported"
