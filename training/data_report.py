"""What a workload's check of a dataset has found: refusals and warnings, and tables of facts.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFinding:
    """One kind of fault: how often, and a sentence with an example and with what to do."""

    rule: str
    is_refused: bool
    count: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """All findings, and tables by title: rows of the same columns each."""

    findings: Sequence[DataFinding]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]

    @property
    def refusals(self) -> list[DataFinding]:
        """What would break training."""
        return [finding for finding in self.findings if finding.is_refused]

    @property
    def warnings(self) -> list[DataFinding]:
        """What somebody should know, and training can do with."""
        return [finding for finding in self.findings if not finding.is_refused]

    def refuse(self) -> None:
        """Raise UserError if training would break: the first faults, and how many more."""
        if refusals := self.refusals:
            named = "; ".join(finding.message for finding in refusals[:3])
            more = (
                f"; `data check --workload` lists {len(refusals) - 3} more" if refusals[3:] else ""
            )
            raise UserError(f"the dataset cannot be trained on: {named}{more}")

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "is_refused": bool(self.refusals),
            "refused": [asdict(finding) for finding in self.refusals],
            "warned": [asdict(finding) for finding in self.warnings],
            "tables": {title: [dict(row) for row in rows] for title, rows in self.tables.items()},
        }
