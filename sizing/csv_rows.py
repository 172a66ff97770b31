"""The rows of a CSV file as objects of a dataclass whose fields are its columns."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

RowType = TypeVar("RowType")


def read_rows(
    path: Path, row_type: type[RowType], **derived: Callable[[Mapping[str, str]], Any]
) -> list[RowType]:
    """Read every row, each value by the type of its field; `derived` computes fields from a row.

    An empty number is 0, or None if the field may be None; a set of words is separated by bars.
    """
    types = get_type_hints(row_type)
    names = [field.name for field in fields(row_type)]  # type: ignore[arg-type]
    with path.open(newline="", encoding="utf-8") as lines:
        return [
            row_type(
                **{
                    name: derived[name](row) if name in derived else _value(row[name], types[name])
                    for name in names
                }
            )
            for row in csv.DictReader(lines)
        ]


def _value(text: str, kind: Any) -> Any:
    if kind is bool:
        return text == "True"
    if kind in (int, float):
        return kind(text or 0)
    if kind == float | None:
        return float(text) if text else None
    return frozenset(text.split("|")) if kind == frozenset[str] else text
