"""AWS's documented limits that no model of a service states: the rows of aws_limits.toml.

The embedded AWS refuses what a row refuses; synth and the doctor take their numbers from here.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class AwsLimit:
    """One limit: how AWS refuses what is beyond it, and the page that documents it.

    `value` is a JMESPath over the parameters of one of its `calls` (in the words of botocore's
    model, with the functions of embedded_aws/limits.py): what may be at most `most`, at least
    `least`, one of `among` or all of a `pattern`. Without any of these, a value is a mistake.
    """

    name: str
    calls: tuple[str, ...]
    value: str
    page: str
    code: str
    message: str  # of the error, with {value}, {most} and {least}
    status: int = 400
    most: float | None = None
    least: float | None = None
    among: tuple[Any, ...] = ()
    pattern: str = ""

    def takes(self, number: float) -> bool:
        """Whether a number is within the bounds."""
        is_enough = self.least is None or number >= self.least
        return is_enough and (self.most is None or number <= self.most)


@cache
def aws_limits() -> Mapping[str, AwsLimit]:
    """Return all limits by name."""
    text = Path(__file__).with_name("aws_limits.toml").read_text(encoding="utf-8")
    rows = {
        name: {key: tuple(each) if isinstance(each, list) else each for key, each in row.items()}
        for name, row in tomllib.loads(text).items()
    }
    return {name: AwsLimit(name=name, **row) for name, row in rows.items()}


def most(name: str) -> int:
    """Return the greatest value that AWS takes."""
    found = aws_limits()[name].most
    assert found is not None
    return int(found)


def least(name: str) -> int:
    """Return the smallest value that AWS takes."""
    found = aws_limits()[name].least
    assert found is not None
    return int(found)
