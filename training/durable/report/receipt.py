"""receipt.json: the facts of an ended run, for people and `sizing plan --run`; and its report."""

import itertools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from contract.goodput import Goodput
from contract.keys import RECEIPT, REPORT
from contract.program import WORKLOAD as PROGRAM
from training.durable.record.goodput import read_guard
from training.durable.record.head import Head
from training.durable.record.history import AttemptSummary, History
from training.durable.record.lease import Lease, mark_failed, with_way_back
from training.durable.record.metrics import compact
from training.durable.record.run import RunConfig
from training.durable.report.page import parse_receipt, write_report
from training.durable.store.protocol import Store, put_unless_changed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The result of training at the end of a run."""

    steps: int
    weights_sha256: str | None  # None: a program left nothing in its model folder
    stages: Mapping[str, Mapping[str, float]]  # the last metrics of each
    numerics_key: Mapping[str, Any] = field(default_factory=dict)
    numerics_changed: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # what only this kind of job has


def write_receipt(
    store: Store, lease: Lease, record: RunConfig, result: RunResult, began: float
) -> None:
    """Write the receipt of a finished run, unless the lease was lost."""
    receipt = {
        **_facts(record, lease.head, state="finished"),
        "steps": result.steps,
        "stages": {stage: dict(metrics) for stage, metrics in result.stages.items()},
        "weights_sha256": result.weights_sha256,
        "numerics_key": dict(result.numerics_key),
        "numerics_changed": list(result.numerics_changed),
        **result.facts,
        "last_attempt_seconds": round(time.monotonic() - began, 3),
        "spent": _read_spending(store),
    }
    lease.put(RECEIPT, json.dumps(receipt, indent=1).encode())


def conclude(store: Store, record: RunConfig, head: Head) -> None:
    """Write the report, and a failed run's receipt; does nothing before the run has ended."""
    if head.state not in ("finished", "failed"):
        return
    compact(store, head.generation)
    write_report(store, record, head, first=partial(_complete, store, record, head))
    _log.info(f"[ok] report: {store.uri}/{REPORT}")


def fail_run(store: Store, writer: str, reason: str) -> Head:
    """Mark a run failed without holding its lease, with report and receipt; return its head."""
    run_id = store.uri.rstrip("/").rpartition("/")[2]
    head = mark_failed(store, run_id, writer, with_way_back(reason, store.uri))
    if (record := RunConfig.read(store)) is not None:
        conclude(store, record, head)
    return head


def _complete(
    store: Store, record: RunConfig, head: Head, history: History, bought: Goodput
) -> None:
    """Write a failed run's receipt; add to it, or to a finished run's, what only history knows.

    That is what the money bought, what was passed over and, if several ranks trained, each
    attempt's machine and ranks.
    """
    found, more = store.get(RECEIPT), _known_from_history(history)
    receipt = parse_receipt(found)
    # A failed run's receipt that says "finished" was written just before an attempt was killed.
    is_missing = receipt.get("state") != head.state
    if is_missing and head.state == "failed":
        receipt = _failed_receipt(record, head, history) | {"spent": _read_spending(store)}
    elif is_missing:
        return
    receipt |= {"goodput": bought.to_json()} | more
    # It must not replace that of another attempt, which has reopened the run.
    data = json.dumps(receipt, indent=1).encode()
    put_unless_changed(store, RECEIPT, data, found.etag if found else None)


def _known_from_history(history: History) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if history.passed_over:
        found["passed_over"] = list(history.passed_over)
    if any((attempt.ranks or 1) > 1 for attempt in history.attempts):
        found["machines"] = [
            {"generation": each.generation, "writer": each.writer, "ranks": each.ranks}
            for each in history.attempts
        ]
    return found


def _failed_receipt(record: RunConfig, head: Head, history: History) -> dict[str, Any]:
    newest = head.checkpoints[-1] if head.checkpoints else None
    return {
        **_facts(record, head, state="failed"),
        "reason": head.reason,
        "steps": max(history.steps["step"], default=0),
        "committed_steps": newest.step if newest else 0,
        "stages": {stage: lines[-1]["metrics"] for stage, lines in history.evaluations().items()},
        "numerics_key": dict(record.numerics_key),
        **(interruption_facts(history) if record.workload == PROGRAM else {}),
    }


def _facts(record: RunConfig, head: Head, *, state: str) -> dict[str, Any]:
    """Return the facts of every receipt: which run it was, how long it took, its predicted cost."""
    created = datetime.fromisoformat(record.created_at)
    newest = head.checkpoints[-1] if head.checkpoints else None
    return {
        "format": 1,
        "run_id": record.run_id,
        "workload": record.workload,
        "recipe": record.recipe,
        "overrides": dict(record.overrides),
        "state": state,
        **({"origin": record.origin} if record.origin else {}),
        "seconds": round((datetime.now(UTC) - created).total_seconds(), 3),
        "prediction": record.prediction,
        "dataset": record.dataset,
        "bundle_uri": record.bundle_uri,
        "generations": head.generation,
        "writer": head.writer,
        "skipped_steps": list(head.skipped_steps),
        "checkpoint_bytes": sum(file.bytes for file in newest.files) if newest else 0,
    }


def interruption_facts(history: History) -> dict[str, Any]:
    """Return what the end of each attempt of a program except the last has cost, where known."""
    unsaved, costs = history.unsaved(), list[dict[str, Any]]()
    codes = {
        line["generation"]: line.get("exit_code")
        for line in history.lines
        if line["kind"] in ("running", "ended")
    }
    for number, attempt in enumerate(history.attempts[:-1]):
        costs.append(
            {
                "generation": attempt.generation,
                "writer": attempt.writer,
                "ended": attempt.ended,  # released, or silent: the machine was lost without a word
                "cause": attempt.cause,  # notice or shutdown, where one came
                "exit_code": codes.get(attempt.generation),  # if the program ended by itself
                # Since the state in the last snapshot; after a silent end, at least.
                "seconds_lost": unsaved[attempt.generation],
                "steps_redone": _steps_redone(history, attempt, history.attempts[number + 1 :]),
            }
        )
    redone = [cost["steps_redone"] for cost in costs]
    return {
        "interruptions": costs,
        "seconds_lost": round(sum(cost["seconds_lost"] or 0.0 for cost in costs), 3),
        "steps_redone": None if None in redone else sum(redone),
    }


def _steps_redone(
    history: History, attempt: AttemptSummary, later: Sequence[AttemptSummary]
) -> int | None:
    """Return how many of an attempt's steps a later one repeated; None if metrics name no steps.

    A program may report only every tenth step: its first line after a restart is taken to cover as
    many steps as lie between other lines.
    """
    steps = history.steps["step"]
    if not steps:
        return None
    first = next((one.first_step for one in later if one.first_step is not None), None)
    if attempt.last_step is None or first is None:
        return 0
    gaps = sorted(after - before for before, after in itertools.pairwise(steps))
    stride = gaps[len(gaps) // 2] if gaps else 1
    return max(0, attempt.last_step - (first - stride))


def _read_spending(store: Store) -> dict[str, Any] | None:
    """Return dollars and hours by market at the Guard's last call; None if there is no Guard.

    A trainer does not know prices: the Guard keeps count in guard.json. `moves` is how often the
    run moved to on demand or back.
    """
    document = read_guard(store)
    try:
        billed: Mapping[str, Mapping[str, float]] = document["billed"]
        return {
            "usd": round(sum(each["usd"] for each in billed.values()), 4),
            "by_market": {market: dict(each) for market, each in billed.items()},
            "moves": int(document.get("market", {}).get("moves", 0)),
        }
    except (ValueError, TypeError, KeyError, AttributeError):  # from an older Guard
        return None
