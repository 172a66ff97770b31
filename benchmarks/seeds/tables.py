"""Every number that the seed documents claim, with a computed figure.

claims.csv has the claims as written, with their lines; its column `ours` names a function of
figures.py or model_figures.py, and so does {...} within `why`. A claim without one cannot be known.
"""

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.seeds.figures import FIGURES
from benchmarks.seeds.model_figures import MODEL_FIGURES

CLAIMS_FILE = Path(__file__).with_name("claims.csv")
SEEDS = ("000", "001", "002", "003", "004")
# Claims are rounded, such as $1.21 for 1.212, except those with five digits or more.
_CLOSE, _EXACT, _EXACT_DIGITS = 0.015, 0.0005, 5
# In `why`: {name:argument,argument}, as in the column `ours`.
_FIGURE = re.compile(r"\{([^}]+)\}")
Verdict = Literal["reproduced", "adds up", "corrected", "cannot be known"]
# Functions that use only figures from the document itself.
_OF_THE_DOCUMENT = ("arithmetic", "sum", "quotient", "minutes_of_epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One figure of a seed document, and ours; `claimed` may be a range such as 1..2, or words.

    `lines` are the document's lines that have it, `written` is its wording there.
    """

    seed: str
    table: str
    lines: tuple[int, ...]
    what: str
    written: str
    claimed: str
    unit: str
    ours: float | str | None
    how: str
    why: str

    @property
    def verdict(self) -> Verdict:
        """Whether ours agrees, or the document at least agrees with itself."""
        if self.ours is None:
            return "cannot be known"
        if self.difference != "same":
            return "corrected"
        return "adds up" if self.how.split(":")[0] in _OF_THE_DOCUMENT else "reproduced"

    @property
    def difference(self) -> str:
        """The claim relative to ours: a percentage, a factor if it is large, or `same`."""
        if self.ours is None:
            return "-"
        if isinstance(self.ours, str):
            return "same" if self.ours == self.claimed else self.ours
        low, high = self.range
        near = min(max(self.ours, low), high)
        if math.isclose(near, self.ours, rel_tol=self._tolerance):
            return "same"
        if not self.ours or not near:
            return "left out"
        ratio = near / self.ours
        return f"{ratio:.2g} x" if not 0.5 < ratio < 2 else f"{ratio - 1:+.0%}"

    @property
    def _tolerance(self) -> float:
        digits = self.claimed.replace(".", "").lstrip("0")
        if "." not in self.claimed:
            digits = digits.rstrip("0")
        return _EXACT if digits.isdigit() and len(digits) >= _EXACT_DIGITS else _CLOSE

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most that a numeric claim says."""
        low, _, high = self.claimed.partition("..")
        return float(low), float(high or low)


def claims(seed: str) -> list[Claim]:
    """Return every figure of a seed document, in the order of its tables."""
    if seed not in SEEDS:
        raise ValueError(f"unknown document {seed!r}; known: {', '.join(SEEDS)}")
    with CLAIMS_FILE.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["seed"] == seed]
    return [
        Claim(
            seed=seed,
            table=row["table"],
            lines=tuple(int(line) for line in row["lines"].split()),
            what=row["what"],
            written=row["written"],
            claimed=row["claimed"],
            unit=row["unit"],
            ours=evaluate(row["ours"]) if row["ours"] else None,
            how=row["ours"],
            why=_FIGURE.sub(lambda found: _shown(evaluate(found[1])), row["why"]),
        )
        for row in rows
    ]


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def evaluate(text: str) -> float | str:
    """Return the result of `name:argument,argument` from the column `ours`."""
    name, _, rest = text.partition(":")
    found = {**FIGURES, **MODEL_FIGURES}[name](*(rest.split(",") if rest else ()))
    return found if isinstance(found, str) else float(found)
