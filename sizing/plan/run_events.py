"""What a run's events say about its restarts: boot, and from there to the take-over.

Events are read from events/ beside the receipt; a run without them (or a laptop's) teaches nothing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from contract.keys import EVENTS


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRestarts:
    """Medians over the machines of a run; None where no event says it.

    user_data_seconds   user data, without the dataset's sync
    first_step_seconds   from there until a replacement has resumed
    """

    user_data_seconds: float | None = None
    first_step_seconds: float | None = None

    def constants(self) -> dict[str, float]:
        """Return what is known, by the name of the constant."""
        known = {
            "user_data_seconds": self.user_data_seconds,
            "first_step_seconds": self.first_step_seconds,
        }
        return {name: value for name, value in known.items() if value is not None}


def seen_restarts(folder: Path) -> SeenRestarts:
    """Read the events of a run's folder; damaged ones are passed over."""
    by_machine: dict[str, dict[str, Mapping[str, Any]]] = {}
    for event in _events(folder):
        # The first of each name: a machine that restarts its trainer resumes more than once.
        by_machine.setdefault(str(event.get("instance_id")), {}).setdefault(event["name"], event)
    boots, steps = [], []
    for events in by_machine.values():
        boot, resumed = events.get("boot"), events.get("resumed")
        if boot is None or "seconds" not in boot:
            continue
        sync = float(events.get("boot-dataset", {}).get("seconds", 0.0))
        boots.append(max(0.0, float(boot["seconds"]) - sync))
        if resumed is not None:
            steps.append((_time(resumed) - _time(boot)).total_seconds())
    return SeenRestarts(
        user_data_seconds=median(boots) if boots else None,
        first_step_seconds=median(known) if (known := [s for s in steps if s >= 0]) else None,
    )


def _events(folder: Path) -> Iterable[dict[str, Any]]:
    for path in sorted((folder / EVENTS).glob("*.json")):
        try:
            event = json.loads(path.read_text(encoding="utf-8"))
            _time(event)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if "name" in event:
            yield event


def _time(event: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(event["time"])
