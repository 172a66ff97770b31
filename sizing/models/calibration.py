"""Calibration: constants measured by finished runs, which later plans use.

`python -m sizing plan --run RUN --calibrate` adds an entry to sizing/calibration.json. Its launches
count for its workload and recipe on any GPU, because the host makes them; its other times and
memory only on its own GPU; its restarts only on its own size.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean

from sizing.models.constants import Constants

CALIBRATION_FILE = Path(__file__).parent.parent / "calibration.json"
_OF_THE_HOST = frozenset(["launch_factor"])
_OF_THE_GPU = frozenset(["time_factor", "memory_factor"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The constants that one run measured, by name."""

    run: str
    workload: str
    recipe: str
    size: str
    gpu: str
    date: str
    constants: Mapping[str, float]


@cache
def entries(path: Path = CALIBRATION_FILE) -> tuple[Entry, ...]:
    """Return all entries of a calibration file; none if it does not exist."""
    if not path.exists():
        return ()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return tuple(Entry(**entry) for entry in content["entries"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as a calibration ({error}); fix it or remove it"
        ) from error


def calibrated(
    workload: str, recipe: str, size: str, gpu: str, *, path: Path = CALIBRATION_FILE
) -> tuple[Constants, tuple[str, ...]]:
    """Return the constants for a plan, and the runs that measured them."""
    values: dict[str, list[float]] = {}
    runs: list[str] = []
    for entry in entries(path):
        same_work = (entry.workload, entry.recipe) == (workload, recipe)
        for name, value in entry.constants.items():
            if name in _OF_THE_HOST:
                counts = same_work
            elif name in _OF_THE_GPU:
                counts = same_work and entry.gpu == gpu
            else:
                counts = entry.size == size
            if counts:
                values.setdefault(name, []).append(value)
                runs.append(entry.run)
    means = {name: geometric_mean(found) for name, found in values.items()}
    return Constants().replaced(means), tuple(dict.fromkeys(runs))


def add_entry(entry: Entry, path: Path = CALIBRATION_FILE) -> None:
    """Add an entry, replacing one of the same run; an unknown constant is a ValueError."""
    Constants().replaced(entry.constants)
    kept: Sequence[Entry] = [each for each in entries(path) if each.run != entry.run]
    content = {"format": 1, "entries": [asdict(each) for each in (*kept, entry)]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    entries.cache_clear()
