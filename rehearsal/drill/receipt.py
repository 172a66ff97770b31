"""The demo's receipt: what happened, what it cost, and whether anything but time was lost."""

from collections.abc import Mapping, Sequence
from typing import Any

from contract.keys import HEAD
from rehearsal.drill.interruptions import Interruption, steps_lost
from rehearsal.drill.lineage import Files, read_events, read_json, read_lineage, read_metrics
from rehearsal.drill.outcome import (
    Rehearsed,
    common_facts,
    common_faults,
    cost_rows,
    end_rows,
    read_receipt,
    start_rows,
)


def make_receipt(rehearsed: Rehearsed) -> dict[str, Any]:
    """Compile the receipt from the stores of both runs and what was seen from outside."""
    ours, theirs = read_receipt(rehearsed.run), read_receipt(rehearsed.reference)
    lineage, reference = read_lineage(rehearsed.run), read_lineage(rehearsed.reference)
    resumes = [line for line in read_metrics(rehearsed.run) if line["kind"] == "resume"]
    gained = _gained_steps(rehearsed.run)
    interruptions = [_describe(each, resumes, gained) for each in rehearsed.drill.interruptions]
    notices = [item["notice_to_commit_seconds"] for item in interruptions if item["notice"]]
    lost = sum(item["steps_lost"] for item in interruptions)
    head = read_json(rehearsed.run, HEAD) or {}
    return {
        **common_facts(rehearsed, ours),
        "steps": len(lineage.steps),
        "steps_computed": len(lineage.steps) + lost,
        "interruption_list": interruptions,
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
        f"no commit was seen after {lost_notice}; did the run finish before it?": bool(lost_notice),
    }
    broken = [text for text, is_broken in checks.items() if is_broken]
    return [
        *receipt["lineage_problems"],
        *broken,
        *common_faults(receipt, expected_interruptions),
    ]


def receipt_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the receipt's rows as people read them: name and value."""
    equal = (
        receipt["weights_sha256"] == receipt["uninterrupted_weights_sha256"]
        and receipt["losses_equal"]
    )
    commit = receipt["notice_to_commit_seconds"]
    gained = sum(item.get("gained_steps", 0) for item in receipt["interruption_list"])
    return [
        *start_rows(receipt),
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
        *cost_rows(receipt),
        *end_rows(receipt),
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
