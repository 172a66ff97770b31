"""`python -m training data check --workload NAME`: what is in a dataset's files."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from contract.keys import MANIFEST
from training.errors import EXIT_FINISHED, UserError
from training.registry import load_workload
from training.report.progress import ProgressBar
from training.store.local_dataset import open_dataset
from training.workload import Workload, implements


def check_content(name: str, folder: Path, *, as_json: bool) -> int:
    """Print what the workload finds; UserError, exit code 2, if training would break."""
    workload = load_workload(name)
    if not implements(workload, Workload.check_data):
        raise UserError(
            f"workload {workload.name!r} cannot check what is in a dataset: it has no check_data "
            "(training/workload.py); leave --workload out"
        )
    # Progress goes to stderr, so that what is found can be piped.
    with redirect_stdout(sys.stderr):
        if (folder / MANIFEST).is_file():
            open_dataset(folder, again=True)
        with ProgressBar(f"checking {folder.name}", 0) as bar:
            report = workload.check_data(
                folder, lambda done, total: bar.show(done, "images", total)
            )
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        for title, rows in report.tables.items():
            print("\n".join([title, *_table(rows), ""]))
        for finding in report.findings:
            print(f"[{'refused' if finding.is_refused else 'warning'}] {finding.message}")
        if not report.refusals:
            print(f"[ok] {folder} can be trained on; warnings: {len(report.warnings)}")
    if refused := [finding.rule for finding in report.refusals]:
        raise UserError(f"{folder} cannot be trained on: it was refused for {', '.join(refused)}")
    return EXIT_FINISHED


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines with the columns below each other, numbers to the right."""
    names = list(rows[0]) if rows else []
    columns = [[name, *(str(row[name]) for row in rows)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    is_number = [all(isinstance(row[name], int | float) for row in rows) for name in names]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in zip(*columns, strict=True)
    ]
