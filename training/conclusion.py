"""What a run leaves when it has ended, finished or failed: receipt and report. No torch."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from training.head import Head
from training.history import History, read_history
from training.record import RunRecord
from training.report import write_report
from training.store import Store

RECEIPT = "receipt.json"


def conclude(store: Store, record: RunRecord, head: Head) -> None:
    """Write what an ended run leaves; nothing while the run goes on."""
    if head.state not in ("finished", "failed"):
        return
    if head.state == "failed" and store.get(RECEIPT) is None:
        receipt = _failed_receipt(record, head, read_history(store))
        store.put(RECEIPT, json.dumps(receipt, indent=1).encode())
    write_report(store, record, head)
    print(f"[ok] report: {store.uri}/report.html", flush=True)


def _failed_receipt(record: RunRecord, head: Head, history: History) -> dict[str, Any]:
    created = datetime.fromisoformat(record.created_at)
    stages: dict[str, Mapping[str, float]] = {
        stage: lines[-1]["metrics"] for stage, lines in history.evaluations().items()
    }
    newest = head.checkpoints[-1] if head.checkpoints else None
    return {
        "format": 1,
        "run_id": record.run_id,
        "workload": record.workload,
        "recipe": record.recipe,
        "overrides": dict(record.overrides),
        "state": "failed",
        "reason": head.reason,
        "steps": max(history.steps, default=0),
        "committed_steps": newest.step if newest else 0,
        "generations": head.generation,
        "stages": stages,
        "numerics_key": dict(record.numerics_key),
        "seconds": round((datetime.now(UTC) - created).total_seconds(), 3),
        "checkpoint_bytes": sum(file.bytes for file in newest.files) if newest else 0,
        "prediction": record.prediction,
        "dataset": record.dataset,
        "bundle_uri": record.bundle_uri,
        "writer": head.writer,
    }
