"""The findings of a workload's dataset check: refusals, warnings and tables of facts.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contract.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFinding:
    """One kind of fault: its count, and a sentence with an example and what to do."""

    rule: str
    is_refused: bool
    count: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """All findings, and tables by title; the rows of a table have the same columns."""

    findings: Sequence[DataFinding]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]

    @property
    def refusals(self) -> list[DataFinding]:
        """Findings that would break training."""
        return [finding for finding in self.findings if finding.is_refused]

    @property
    def warnings(self) -> list[DataFinding]:
        """Findings that users should know of but training can cope with."""
        return [finding for finding in self.findings if not finding.is_refused]

    def refuse(self) -> None:
        """Raise UserError if training would break; name the first faults and count the rest."""
        if refusals := self.refusals:
            named = "; ".join(finding.message for finding in refusals[:3])
            more = (
                f"; `data check --workload` lists {len(refusals) - 3} more" if refusals[3:] else ""
            )
            raise DataRefusedError(f"the dataset cannot be trained on: {named}{more}", self)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON, for programs."""
        return {
            "is_refused": bool(self.refusals),
            "refused": [asdict(finding) for finding in self.refusals],
            "warned": [asdict(finding) for finding in self.warnings],
            "tables": {title: [dict(row) for row in rows] for title, rows in self.tables.items()},
        }


class DataRefusedError(UserError):
    """A dataset would break training; the report has every finding, for programs."""

    def __init__(self, message: str, report: DataReport) -> None:
        super().__init__(message)
        self.report = report
