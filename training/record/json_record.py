"""JSON objects of a run that carry a format number; what cannot be read is refused in one sentence.

Imports no torch.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from training.errors import UserError

T = TypeVar("T")


def read_json_record(
    name: str, data: bytes, newest_format: int, build: Callable[[dict[str, Any]], T]
) -> T:
    """Build what the JSON says, its format number taken off."""
    try:
        record = json.loads(data)
        number = record.pop("format")
        if number in range(1, newest_format + 1):
            return build(record)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{name} is torn or was edited ({type(error).__name__}: {error}); put its last good "
            "version back, the checkpoints are as they were"
        ) from error
    raise UserError(
        f"{name} has format {number}, and this version knows 1 to {newest_format}; "
        "run the bundle that config.json names, or a newer one"
    )
