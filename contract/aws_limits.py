"""AWS's documented limits that no model of a service states: the rows of aws_limits.toml.

The embedded AWS refuses what a row refuses; synth and the doctor take their numbers from here.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite
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
    most: float = inf
    least: float = -inf
    among: tuple[Any, ...] = ()
    pattern: str = ""

    @property
    def is_number(self) -> bool:
        return isfinite(self.most) or isfinite(self.least)

    def takes(self, number: float) -> bool:
        """Whether a number is within the bounds."""
        return self.least <= number <= self.most


@cache
def aws_limits() -> Mapping[str, AwsLimit]:
    """Return all limits by name."""
    text = Path(__file__).with_name("aws_limits.toml").read_text(encoding="utf-8")
    found = {}
    for name, row in tomllib.loads(text).items():
        # A frozen row has no lists.
        fixed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        found[name] = AwsLimit(name=name, **fixed)
    return found


def most(name: str) -> int:
    """Return the greatest value that AWS takes."""
    return int(aws_limits()[name].most)


def least(name: str) -> int:
    """Return the smallest value that AWS takes."""
    return int(aws_limits()[name].least)
