"""receipt.json: what a finished run was, for people and for `sizing review`."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from training.head import Head
from training.numerics import changed_parts
from training.position import Position
from training.record import RunRecord
from training.store import Store

RECEIPT = "receipt.json"


def write_receipt(
    store: Store,
    *,
    record: RunRecord,
    head: Head,
    position: Position,
    weights: str,
    numerics_key: Mapping[str, Any],
    began: float,
    peak_gpu_bytes: int | None,
) -> dict[str, Any]:
    """Write the receipt of a run that has reached its end."""
    changed = {*position.numerics_changed, *changed_parts(record.numerics_key, numerics_key)}
    newest = head.checkpoints[-1]
    accuracies = {
        f"{stage}_accuracy": metrics["accuracy"]
        for stage, metrics in position.results.items()
        if "accuracy" in metrics
    }
    if "accuracy" in position.metrics:
        accuracies["validation_accuracy"] = position.metrics["accuracy"]
    created = datetime.fromisoformat(record.created_at)
    receipt: dict[str, Any] = {
        "format": 1,
        "run_id": record.run_id,
        "workload": record.workload,
        "recipe": record.recipe,
        "overrides": dict(record.overrides),
        "state": "finished",
        "steps": position.step,
        "generations": head.generation,
        "stages": {stage: dict(metrics) for stage, metrics in position.results.items()},
        **accuracies,
        "weights_sha256": weights,
        "numerics_key": dict(numerics_key),
        "numerics_changed": sorted(changed),
        "seconds": round((datetime.now(UTC) - created).total_seconds(), 3),
        "last_attempt_seconds": round(time.monotonic() - began, 3),
        "checkpoint_bytes": sum(file.bytes for file in newest.files),
        "peak_gpu_bytes": peak_gpu_bytes,
        "prediction": record.prediction,
        "dataset": record.dataset,
        "bundle_uri": record.bundle_uri,
        "writer": head.writer,
    }
    store.put(RECEIPT, json.dumps(receipt, indent=1).encode())
    return receipt
