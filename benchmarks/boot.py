"""Seconds from start of user data to first optimizer step on a process machine, by boot step.

One rehearsal with a small dataset; each machine is killed at its first step, so that its
replacement boots too. Steps overlap: torch is tested while the dataset syncs. The first machine
also prepares the features; the others find them published, and wait for the lease of the killed
machine to expire.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
FOLDER = Path("out") / "benchmarks" / "boot"
CLIPS = 240


def measure(*, machines: int) -> list[dict[str, Any]]:
    """Boot that many machines in one rehearsal and return one row for each step."""
    if machines < 1:
        raise ValueError(f"a benchmark needs at least one machine, got {machines}")
    kills = ["--interrupt", "kill:single_frame:1"] * (machines - 1)
    command = [sys.executable, "-m", "rehearsal", "demo", "--out", str(FOLDER), "--json"]
    options = ["--clips", str(CLIPS), "--overrides", "single_frame_epochs=1 epochs=1"]
    subprocess.run(
        [*command, *options, *(kills or ["--no-interruptions"])],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    receipt = json.loads((REPOSITORY / FOLDER / "receipt.json").read_text())
    return _rows(receipt["machines"])


def _rows(machines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each boot step with a column for each machine, then the totals."""
    names = [name for name in machines[0]["boot"] if name != "boot"]
    rows = [
        _row(f"boot step {name}", [item["boot"].get(name) for item in machines]) for name in names
    ]
    users = [item["boot"]["boot"] for item in machines]
    first = [item["seconds_to_first_step"] for item in machines]
    waits = [total - user for total, user in zip(first, users, strict=True)]
    return [
        *rows,
        _row("user data, from start to end", users),
        _row("then, until the first step", waits),
        _row("first optimizer step", first),
    ]


def _row(what: str, seconds: Sequence[float | None]) -> dict[str, Any]:
    columns = {f"machine {number}, s": value for number, value in enumerate(seconds, 1)}
    return {"what": what, **columns}
