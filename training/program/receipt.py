"""The receipt of a program's run: what it left, and what each interruption cost."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contract.keys import RECEIPT
from contract.lineage import Line
from training.program.final import FinalFiles
from training.record.history import AttemptSummary, History, read_history
from training.record.lease import Lease
from training.record.run_config import RunConfig
from training.report.receipt import receipt_facts
from training.report.spending import read_spending
from training.store.protocol import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptionCost:
    """What the end of one attempt that was not the last has cost."""

    generation: int
    writer: str
    ended: str  # released, or silent: the machine was lost without a word
    cause: str | None  # notice or shutdown, where one came
    exit_code: int | None  # of the program, where it ended by itself
    # Since what the last snapshot holds; of a silent end, at least; None: nobody heard of it.
    seconds_lost: float | None
    steps_redone: int | None  # None: its metrics name no steps


def interruption_costs(history: History) -> list[InterruptionCost]:
    """One for each attempt but the last."""
    lines: dict[int, list[Line]] = {}
    for line in history.lines:
        if line["kind"] in ("running", "ended"):
            lines.setdefault(int(line["generation"]), []).append(line)
    found = []
    for number, attempt in enumerate(history.attempts[:-1]):
        last = (lines.get(attempt.generation) or [{}])[-1]
        lost = last.get("unsaved_seconds")
        found.append(
            InterruptionCost(
                generation=attempt.generation,
                writer=attempt.writer,
                ended=attempt.ended,
                cause=attempt.cause,
                exit_code=last.get("exit_code"),
                seconds_lost=None if lost is None else round(float(lost), 3),
                steps_redone=_steps_redone(history, attempt, history.attempts[number + 1 :]),
            )
        )
    return found


def _steps_redone(
    history: History, attempt: AttemptSummary, later: Sequence[AttemptSummary]
) -> int | None:
    """Steps of an attempt that a later one did again.

    A program may report every tenth step only: what follows its first line after a restart is
    taken for what lies before it.
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


def _lost(costs: Sequence[InterruptionCost]) -> dict[str, Any]:
    redone = [cost.steps_redone for cost in costs if cost.steps_redone is not None]
    return {
        "interruptions": [asdict(cost) for cost in costs],
        "seconds_lost": round(sum(cost.seconds_lost or 0.0 for cost in costs), 3),
        "steps_redone": sum(redone) if len(redone) == len(costs) else None,
    }


def write_program_receipt(
    store: Store,
    lease: Lease,
    record: RunConfig,
    *,
    final: FinalFiles,
    metrics: Mapping[str, float],
    warnings: Sequence[str],
    began: float,
) -> dict[str, Any]:
    """Write the receipt of a finished run, unless the lease was lost."""
    history = read_history(store)
    head = lease.head
    steps = history.steps["step"]
    receipt: dict[str, Any] = {
        **receipt_facts(record, head, state="finished"),
        "program": record.config["command"],
        "exit_code": 0,
        "steps": max(steps) if len(steps) else 0,
        "snapshots": max((entry.step for entry in head.checkpoints), default=0),
        **_lost(interruption_costs(history)),
        "warnings": list(warnings),
        "stages": {record.workload: dict(metrics)},
        "final_files": dict(final.sha256),
        "final_bytes": final.bytes,
        "weights_sha256": final.digest,
        "numerics_key": {},
        "numerics_changed": [],
        "last_attempt_seconds": round(time.monotonic() - began, 3),
        "spent": read_spending(store),
    }
    lease.put(RECEIPT, json.dumps(receipt, indent=1).encode())
    return receipt
