"""The receipt of a rehearsal: what happened, what it cost, and whether anything but time was lost.

A workload promises equal bits. A program promises nothing, as it decides itself what to do after a
restart: its receipt says what the interruptions cost and how the result differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from contract.keys import HEAD, RECEIPT
from contract.lineage import Line
from embedded_aws import EventBus
from rehearsal.demo.actions import RehearsedRun, SeenInterruption, steps_lost
from rehearsal.demo.fleet import MachineLife, RehearsalFailed, user_data_faults
from rehearsal.demo.grants import usage
from rehearsal.demo.run_files import Files, losses, read_events, read_json, read_metrics, read_steps

# By stage: the steps of the interrupted run, and of the uninterrupted one.
Curves: TypeAlias = dict[str, tuple[list[Line], list[Line]]]


# Facts of a program's own receipt.
_OF_A_PROGRAM = ("program", "steps", "steps_redone", "seconds_lost", "snapshots")
_FILES = ("final_files", "checkpoint_files")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """The facts from which a receipt is made."""

    run: RehearsedRun
    reference: Files
    resources: Mapping[str, int]
    permissions: Mapping[str, Any]
    processes_left: int
    notice_seconds: float
    seconds: float

    @property
    def lives(self) -> Sequence[MachineLife]:
        """The machines, in the order in which they booted."""
        return list(self.run.fleet.lives.values())


def make_receipt(rehearsed: Rehearsed) -> dict[str, Any]:
    """Compile the receipt from both runs' files and observations from outside the machines."""
    ours, theirs = _own_receipt(rehearsed.run.files), _own_receipt(rehearsed.reference)
    interruptions = rehearsed.run.interruptions
    invocations = rehearsed.run.fleet.bus.invocations
    head = read_json(rehearsed.run.files, HEAD) or {}
    facts = _program_facts if "program" in ours else _workload_facts
    return {
        "resources": sum(rehearsed.resources.values()),
        "resources_by_type": dict(sorted(rehearsed.resources.items())),
        "dataset": _dataset(rehearsed.run.files),
        "workload": ours["workload"],
        "recipe": ours["recipe"],
        "attempts": head["generation"],
        "interruptions": len(interruptions),
        "notice_seconds": rehearsed.notice_seconds,
        **facts(rehearsed, ours, theirs),
        "fleet_target_capacity": rehearsed.run.fleet.target_capacity(),
        "instances_running": sum(life.ended is None for life in rehearsed.lives),
        "processes_left": rehearsed.processes_left,
        "user_data_faults": user_data_faults(rehearsed.lives),
        **usage(rehearsed.permissions),
        "guard_invocations": len(invocations),
        "guard_actions": [each.answer for each in invocations],
        "guard_errors": [each.error for each in invocations if each.error],
        "guard_retries": sum(each.tries - 1 for each in invocations),
        "spent": ours["spent"],
        "goodput": ours["goodput"],
        "machines": _machines(rehearsed),
        "seconds": round(rehearsed.seconds, 1),
    }


def compare_runs(
    run: Files, reference: Files, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the facts that `inequalities` judges; `ours` and `theirs` are the runs' receipts."""
    steps, others = read_steps(run), read_steps(reference)
    return {
        "weights_sha256": ours["weights_sha256"],
        "uninterrupted_weights_sha256": theirs["weights_sha256"],
        "losses_equal": losses(steps) == losses(others),
        "samples_have_order": any(
            line["num_samples"] < line["split_samples"] for line in steps.values()
        ),
        "rules_broken": run.rules_broken(),
    }


def inequalities(facts: Mapping[str, Any]) -> list[str]:
    """List what differs from the uninterrupted run: samples, weights, losses."""
    found = list(facts["rules_broken"])
    if facts["weights_sha256"] != facts["uninterrupted_weights_sha256"]:
        found.append("the weights differ from the uninterrupted run's")
    if not facts["losses_equal"]:
        found.append("the losses differ from the uninterrupted run's")
    return found


def find_faults(receipt: Mapping[str, Any], expected_interruptions: int) -> list[str]:
    """List the promises that a receipt shows as broken; none after a good rehearsal."""
    happened = receipt["interruptions"]
    checks = {
        f"{happened} interruptions happened, not {expected_interruptions}": (
            happened != expected_interruptions
        ),
        f"{receipt['instances_running']} instances are still running": receipt["instances_running"]
        > 0,
        f"{receipt['processes_left']} processes were left behind": receipt["processes_left"] > 0,
        **({} if "job" in receipt else _fleet_checks(receipt)),
    }
    own = _program_faults(receipt) if "program" in receipt else _workload_faults(receipt)
    return [
        *own,
        *receipt.get("user_data_faults", []),
        *receipt["denied"],
        *(text for text, is_broken in checks.items() if is_broken),
    ]


def _fleet_checks(receipt: Mapping[str, Any]) -> dict[str, bool]:
    return {
        f"the fleet's target is {receipt['fleet_target_capacity']}, not 0": (
            receipt["fleet_target_capacity"] != 0
        ),
        "the Guard never ran": receipt["guard_invocations"] == 0,
        f"the Guard failed on {len(receipt['guard_errors'])} events, each of them tried "
        f"{EventBus.TRIES} times: {'; '.join(receipt['guard_errors'][:1])}": bool(
            receipt["guard_errors"]
        ),
    }


def loss_curves(run: Files, reference: Files, receipt: Mapping[str, Any]) -> Curves:
    """Return the steps to draw of the interrupted and the uninterrupted run, by stage."""
    if "program" in receipt:
        found = receipt["losses"], receipt["uninterrupted_losses"]
        return {"the program": found} if any(found) else {}
    stages: Curves = {}
    for number, files in enumerate((run, reference)):
        for _, line in sorted(read_steps(files).items()):
            stages.setdefault(line["stage"], ([], []))[number].append(line)
    return stages


def baselines_of(stages: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the accuracies of the stages before the last one: the baselines of the result."""
    accuracies = [(name, m["accuracy"]) for name, m in stages.items() if "accuracy" in m]
    return dict(accuracies[:-1])


def _workload_facts(
    rehearsed: Rehearsed, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    files = rehearsed.run.files
    events = read_events(files)
    resumes = [line for line in read_metrics(files) if line["kind"] == "resume"]
    # By machine: the steps that it did and committed after the first commit in its notice.
    gained = {e["instance_id"]: int(e["gained_steps"]) for e in events if "gained_steps" in e}
    interruptions = [
        {
            "what": f"{_kind(each)} {where(each.planned.stage, each.reached)}",
            **_seen(each),
            "gained_steps": gained.get(each.life.instance.id, 0),
            "steps_lost": steps_lost(each, resumes),
        }
        for each in rehearsed.run.interruptions
    ]
    lost = sum(item["steps_lost"] for item in interruptions)
    return results(files, rehearsed.reference, ours, theirs, interruptions, lost)


def where(stage: str | None, reached: Line) -> str:
    """Return which step or shard of a stage a run had reached in its last line of progress."""
    unit = "shard" if reached.get("kind") == "prepare" else "step"
    return f"in {stage} at {unit} {reached.get('stage_step', reached.get('done'))}"


def results(
    run: Files,
    reference: Files,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    interruptions: Sequence[Mapping[str, Any]],
    num_lost: int,
) -> dict[str, Any]:
    """Return the results of a workload's run, with interruptions, next to those of one without."""
    notices = [item["notice_to_commit_seconds"] for item in interruptions if item["notice"]]
    num_steps = len(read_steps(run))
    return {
        "steps": num_steps,
        "steps_computed": num_steps + num_lost,
        "steps_lost": num_lost,
        "interruption_list": interruptions,
        "notice_to_commit_seconds": max(notices) if None not in notices and notices else None,
        "stages": ours["stages"],
        "validation_accuracy": ours.get("validation_accuracy"),
        "baseline_accuracies": baselines_of(ours["stages"]),
        "facts": ours.get("facts", {}).get([*ours["stages"]][-1], {}),
        **compare_runs(run, reference, ours, theirs),
        "numerics_key": ours["numerics_key"],
        "uninterrupted_numerics_key": theirs["numerics_key"],
    }


def _workload_faults(receipt: Mapping[str, Any]) -> list[str]:
    faults = inequalities(receipt)
    if receipt["numerics_key"] != receipt["uninterrupted_numerics_key"]:
        faults.append("the numerics keys differ; receipt.json has both")
    lost = [
        item["what"]
        for item in receipt["interruption_list"]
        if item["notice"] and item["notice_to_commit_seconds"] is None
    ]
    if lost:
        faults.append(
            f"no commit was seen after the {' or the '.join(lost)}; did the run finish earlier?"
        )
    return faults


def _program_facts(
    rehearsed: Rehearsed, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    costs = {cost["generation"]: cost for cost in ours["interruptions"]}
    interruptions = []
    for each in rehearsed.run.interruptions:
        cost = costs.get(int(each.reached.get("generation", 0)), {})
        redone, what = cost.get("steps_redone"), _kind(each)
        # If the program names no steps, this is a snapshot's number.
        if redone is not None:
            what += f" at step {each.reached.get('step', 0)}, {redone} steps done again"
        lost = cost.get("seconds_lost")
        interruptions.append(
            {"what": what, **_seen(each), "steps_redone": redone, "seconds_lost": lost}
        )
    return {
        **{name: ours[name] for name in _OF_A_PROGRAM},
        "interruption_list": interruptions,
        "warnings": ours["warnings"],
        "last_metrics": ours["stages"]["program"],
        "uninterrupted_last_metrics": theirs["stages"]["program"],
        "losses": _losses(rehearsed.run.files),
        "rules_broken": rehearsed.run.files.rules_broken(),
        "uninterrupted_losses": _losses(rehearsed.reference),
        **{name: ours[name] for name in _FILES},
        **{f"uninterrupted_{name}": theirs[name] for name in _FILES},
    }


def _program_faults(receipt: Mapping[str, Any]) -> list[str]:
    names, others = receipt["final_files"].keys(), receipt["uninterrupted_final_files"].keys()
    faults = list(receipt["rules_broken"])
    if names != others:
        faults.append(
            f"the run left {', '.join(sorted(names)) or 'nothing'} in its model folder, but the "
            f"uninterrupted one {', '.join(sorted(others)) or 'nothing'}"
        )
    if not receipt["snapshots"]:
        faults.append("it saved nothing that is kept, so an interruption loses everything")
    # A run may end within its last notice.
    in_notice = any(item["notice"] for item in receipt["interruption_list"][-1:])
    if receipt["interruptions"] + 1 - receipt["attempts"] not in (0, in_notice):
        faults.append(
            f"{receipt['attempts']} attempts for {receipt['interruptions']} interruptions: one "
            "failed, or the run ended before an interruption"
        )
    return faults


def _losses(run: Files) -> list[dict[str, Any]]:
    """Return every attempt's losses in order of time, for the chart."""
    return [
        {"step": line["step"], "loss": line["loss"], "generation": line["generation"]}
        for line in read_metrics(run)
        if line["kind"] == "step" and "loss" in line
    ]


def _kind(interruption: SeenInterruption) -> str:
    return "notice" if interruption.notice else "kill without notice"


def _seen(interruption: SeenInterruption) -> dict[str, Any]:
    seconds = interruption.notice_to_commit_seconds
    return {
        "instance": interruption.life.instance.id,
        "notice": interruption.notice,
        "notice_to_commit_seconds": None if seconds is None else round(seconds, 3),
        "processes_killed": interruption.life.processes_killed,
    }


def _own_receipt(run: Files) -> dict[str, Any]:
    receipt = read_json(run, RECEIPT)
    if receipt is None:
        raise RehearsalFailed("the run has no receipt.json: it did not finish")
    return receipt


def _dataset(run: Files) -> dict[str, float]:
    synced = [event for event in read_events(run) if event["name"] == "dataset-synced"]
    if not synced:
        raise RehearsalFailed("no machine reported a synced dataset")
    first = synced[0]
    megabytes = first["bytes"] / 1e6
    return {
        "files": first["files"],
        "megabytes": round(megabytes, 3),
        "seconds": round(first["seconds"], 3),
        "megabytes_per_second": round(megabytes / max(first["seconds"], 1e-3), 1),
    }


def _machines(rehearsed: Rehearsed) -> list[dict[str, Any]]:
    boots: dict[str, dict[str, float]] = {}
    for event in read_events(rehearsed.run.files):
        if event["name"].startswith("boot") and "seconds" in event:
            name = event["name"].removeprefix("boot-")
            boots.setdefault(event["instance_id"], {})[name] = event["seconds"]
    first = rehearsed.lives[0].started
    head = read_json(rehearsed.run.files, HEAD) or {}
    # The fleet took the last one back because the run had ended: that is not its end.
    finished = head.get("writer") if head.get("state") == "finished" else None
    return [
        {
            "instance": life.instance.id,
            "size": life.instance.type,
            "at": round(life.started - first, 1),
            "seconds": round(life.seconds, 1),
            "ended": "finished" if life.instance.id == finished else life.reason,
            "processes_killed": life.processes_killed,
            "boot": boots.get(life.instance.id, {}),
            "seconds_to_first_progress": life.first_progress,
            "seconds_to_first_step": life.first_step,
        }
        for life in rehearsed.lives
    ]
