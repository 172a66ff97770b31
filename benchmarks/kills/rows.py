"""The rows of the table: public trainers, and save habits with and without commit().

A trainer declares what it requires, and what its users must do, in its inline metadata (PEP 723).
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kills.programs.habits import HABITS

PROGRAMS = Path(__file__).with_name("programs")
# How each row is played, in the page's words.
WAYS = {"alone": "alone", "folder": "ours, folder", "s3": "ours, S3"}
_RESTLESS = ("sqlite", "mapped")  # their files never stop changing
_METADATA = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A program of programs/: how it is started and killed, and in which environment."""

    name: str
    words: str  # its file and its arguments
    requirements: Sequence[str] = ()  # for its own environment; empty: use this one
    answers: Sequence[str] = ("its own",)  # to SIGTERM
    bound_seconds: float = 10.0  # the most lost work that a finished save had held
    users_must: str = ""  # what users must do for an exact resume


def _habit(name: str, *, commits: bool) -> Row:
    return Row(
        name=f"{name}, commit()" if commits else name,
        words=f"habits.py {name}{' --commit' * commits}",
        answers=("ignored", "exit 0", "exit 143", "works 200 s"),
        bound_seconds=120.0 if name in _RESTLESS and not commits else 10.0,
    )


def _trainer(path: Path) -> Row:
    found = _METADATA.search(path.read_text())
    assert found is not None, f"{path} has no inline metadata"
    declared = tomllib.loads(found[1].replace("# ", ""))
    return Row(
        name=path.stem.removeprefix("train_"),
        words=path.name,
        requirements=declared["dependencies"],
        users_must=declared.get("tool", {}).get("kills", {}).get("users_must", ""),
    )


ROWS: Sequence[Row] = (
    *map(_trainer, sorted(PROGRAMS.glob("train_*.py"))),
    *(_habit(name, commits=commits) for commits in (False, True) for name in HABITS),
)
