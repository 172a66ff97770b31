"""The stream of a run's lines and events, however long its attempts."""

import json
import types
from pathlib import Path
from typing import Any

from operate.logs import RunLog
from training.durable.store.folder import FolderStore


def test_the_log_of_a_long_attempt_looks_at_each_line_once(tmp_path: Path) -> None:
    """At each commit it looked at all that were left: 2,000 commits took 30 s."""
    num_looks = 0

    class Line(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal num_looks
            num_looks += key == "step"
            return super().get(key, default)

    store = FolderStore(tmp_path)
    event = {"time": "2026-01-01T00:00:00Z", "instance_id": "i-1"}
    for number in range(21):
        more = {"name": "committed", "step": 50 * number} if number else {"name": "take-over"}
        content = json.dumps({**event, **more, "generation": 1}).encode()
        store.put(f"events/20260101T000000.{number:06d}Z-i-1-x.json", content)
    steps = [Line(kind="evaluation", step=n, metrics={}, generation=1) for n in range(1, 1001)]
    log = RunLog(store)
    log._metrics = types.SimpleNamespace(new=lambda is_last: iter(steps))  # type: ignore[assignment]
    entries = [entry["step"] for entry in log.new() if "step" in entry]
    assert entries == sorted([*range(1, 1001), *range(50, 1001, 50)])
    assert num_looks < 3 * 1000
