"""JSON objects of a run with a format number; an unreadable one is refused in one sentence.

Imports no torch.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from contract.keys import RECEIPT
from training.errors import UserError
from training.store.protocol import Stored

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def read_json_record(
    name: str, data: bytes, newest_format: int, build: Callable[[dict[str, Any]], _T]
) -> _T:
    """Build an object from the JSON without its format number."""
    try:
        record = json.loads(data)
        number = record.pop("format")
        if number in range(1, newest_format + 1):
            return build(record)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{name} is damaged or was edited ({type(error).__name__}: {error}); restore its last "
            "good version, the checkpoints are unaffected"
        ) from error
    raise UserError(
        f"{name} has format {number}, but this version knows 1 to {newest_format}; "
        "run the bundle that config.json names, or a newer one"
    )


def refuse_other_than_counts(record: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError where a field that is there is not a number from 0 on, without fraction."""
    for name in names:
        if name in record and (type(record[name]) is not int or record[name] < 0):
            raise ValueError(f"{name} is {record[name]!r}")


def parse_receipt(found: Stored | None) -> dict[str, Any]:
    """Return the receipt; {} if it is missing or damaged: nothing depends on it."""
    if found is None:
        return {}
    try:
        receipt = json.loads(found.data)
        if isinstance(receipt, dict):
            return receipt
    except ValueError:
        pass
    _log.warning(f"{RECEIPT} is damaged ({len(found.data)} bytes) and is passed over")
    return {}
