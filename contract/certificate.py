"""A program's certificate: what interruptions cost it in `check --program`, and which code.

`check` keeps it in the program's folder, next to the code that it names and no part of it; synth,
the review and each run read it there.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contract.program import Program
from contract.source import CERTIFICATE, source_sha256

_FORMAT = 1
_MOST_CHARACTERS = 600  # of one text
# Fields of a program that change nothing of what was tried.
_INDECISIVE = ("interpreter", "metric_definitions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What was found, in words, on which day, by which version, and of which code."""

    is_good: bool  # equal bits, and a bound on what is lost
    summary: str
    rows: Mapping[str, str]
    code_sha256: str
    program: Mapping[str, Any]
    certified_on: str
    version: str

    def write(self, source: Path) -> None:
        """Keep it in the program's folder; may raise OSError."""
        rows = {name: text[:_MOST_CHARACTERS] for name, text in self.rows.items()}
        texts = {"rows": rows, "summary": self.summary[:_MOST_CHARACTERS]}
        record = {"format": _FORMAT, **asdict(self), **texts}
        (source / CERTIFICATE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, source: Path) -> "Certificate | None":
        """Return the one in the folder; None if there is none, or none that this version reads."""
        try:
            record = json.loads((source / CERTIFICATE).read_text(encoding="utf-8"))
            return cls(**record) if record.pop("format") == _FORMAT else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def certified(source: Path, program: Program) -> dict[str, str]:
    """Return under "is" what is certified of this program and code, and the table if it is theirs.

    The table is repeated by its rows' names.
    """
    found = Certificate.read(source)
    how = f"`python -m training check --program {program.command!r} --source {source}` makes one"
    if found is None:
        return {"is": f"no certificate: what an interruption costs it was not tried; {how}"}
    if found.code_sha256 != source_sha256(source):
        return {"is": f"the code has changed since its certificate of {found.certified_on}; {how}"}
    now = json.loads(json.dumps(asdict(program)))
    others = [n for n, old in found.program.items() if now.get(n, old) != old]
    differs = ", ".join(n.replace("_", " ") for n in others if n not in _INDECISIVE)
    verb = "certified" if found.is_good else "tried, and not certified,"
    how = f" (with another {differs})" if differs else ""
    text = f"{verb} on {found.certified_on} with {found.version}{how}: {found.summary}"
    return {"is": text, **found.rows}
