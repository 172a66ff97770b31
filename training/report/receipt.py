"""receipt.json: the facts of an ended run, for people and `sizing plan --run`; and its report."""

import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from contract.keys import RECEIPT, REPORT
from training.record.head import Head
from training.record.history import History
from training.record.json_record import parse_receipt
from training.record.lease import Lease
from training.record.metrics import compact
from training.record.position import Position
from training.record.run_config import RunConfig, changed_parts
from training.report.bottleneck import longest, sentence
from training.report.page import write_report
from training.report.spending import read_spending
from training.store.protocol import Store, put_unless_changed

_log = logging.getLogger(__name__)


def receipt_facts(record: RunConfig, head: Head, *, state: str) -> dict[str, Any]:
    """What every receipt says: which run this was, how long it took, what it was to cost."""
    created = datetime.fromisoformat(record.created_at)
    return {
        "format": 1,
        "run_id": record.run_id,
        "workload": record.workload,
        "recipe": record.recipe,
        "overrides": dict(record.overrides),
        "state": state,
        "seconds": round((datetime.now(UTC) - created).total_seconds(), 3),
        "prediction": record.prediction,
        "dataset": record.dataset,
        "bundle_uri": record.bundle_uri,
        "generations": head.generation,
        "writer": head.writer,
    }


def write_receipt(
    lease: Lease,
    *,
    run_config: RunConfig,
    position: Position,
    weights: str,
    numerics_key: Mapping[str, Any],
    began: float,
    peak_gpu_bytes: int | None,
    spent: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write the receipt of a finished run, unless the lease was lost."""
    head = lease.head
    changed = {*position.numerics_changed, *changed_parts(run_config.numerics_key, numerics_key)}
    newest = head.checkpoints[-1]
    accuracies = {
        f"{stage}_accuracy": metrics["accuracy"]
        for stage, metrics in position.results.items()
        if "accuracy" in metrics
    }
    if "accuracy" in position.metrics:
        accuracies["validation_accuracy"] = position.metrics["accuracy"]
    receipt: dict[str, Any] = {
        **receipt_facts(run_config, head, state="finished"),
        "steps": position.step,
        "skipped_steps": list(head.skipped_steps),
        "stages": {stage: dict(metrics) for stage, metrics in position.results.items()},
        **({"facts": dict(position.facts)} if position.facts else {}),
        **_bottleneck(position, str(numerics_key["device"])),
        **accuracies,
        "weights_sha256": weights,
        "numerics_key": {
            **numerics_key,
            **({"chosen": dict(position.numerics)} if position.numerics else {}),
        },
        "numerics_changed": sorted(changed),
        "last_attempt_seconds": round(time.monotonic() - began, 3),
        "checkpoint_bytes": sum(file.bytes for file in newest.files),
        "peak_gpu_bytes": peak_gpu_bytes,
        "spent": spent,
    }
    lease.put(RECEIPT, json.dumps(receipt, indent=1).encode())
    return receipt


def _bottleneck(position: Position, device: str) -> dict[str, Any]:
    """Where the stages' time went, and in a sentence what bound the one that took the most."""
    found = longest(position.times)
    said = sentence(*found, device) if found else None
    return {"bottleneck": said, "times": dict(position.times)} if said else {}


def conclude(store: Store, record: RunConfig, head: Head) -> None:
    """Write the report, and a failed run's receipt; does nothing before the run has ended."""
    if head.state not in ("finished", "failed"):
        return
    compact(store, head.generation)
    write_report(store, record, head, first=lambda history: _complete(store, record, head, history))
    _log.info(f"[ok] report: {store.uri}/{REPORT}")


def _complete(store: Store, record: RunConfig, head: Head, history: History) -> None:
    """Write a failed run's receipt; say in it, or in a finished run's, what was passed over."""
    found = store.get(RECEIPT)
    receipt = parse_receipt(found)
    # What says "finished" of a failed run was written just before its last attempt was killed.
    is_missing = receipt.get("state") != head.state
    if is_missing and head.state == "failed":
        receipt = _failed_receipt(record, head, history) | {"spent": read_spending(store)}
    elif is_missing or not history.passed_over:
        return
    receipt |= {"passed_over": list(history.passed_over)} if history.passed_over else {}
    # Not over that of another attempt, which has reopened the run.
    data = json.dumps(receipt, indent=1).encode()
    put_unless_changed(store, RECEIPT, data, found.etag if found else None)


def _failed_receipt(record: RunConfig, head: Head, history: History) -> dict[str, Any]:
    stages: dict[str, Mapping[str, float]] = {
        stage: lines[-1]["metrics"] for stage, lines in history.evaluations().items()
    }
    newest = head.checkpoints[-1] if head.checkpoints else None
    return {
        **receipt_facts(record, head, state="failed"),
        "reason": head.reason,
        "steps": max(history.steps["step"], default=0),
        "committed_steps": newest.step if newest else 0,
        "skipped_steps": list(head.skipped_steps),
        "stages": stages,
        "numerics_key": dict(record.numerics_key),
        "checkpoint_bytes": sum(file.bytes for file in newest.files) if newest else 0,
    }
