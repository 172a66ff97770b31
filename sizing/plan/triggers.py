"""Triggers for another size, as rules: which fired, on what evidence, and would the advice help?

The thresholds are in rules.json next to this file (or in a file of the user's). Each rule that
fires is checked against the models, because several common rules name the wrong remedy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sizing.plan.plan import Plan
from sizing.plan.request import Request
from sizing.plan.verdicts import SIGNALS
from sizing.suggestion import suggest

RULES_FILE = Path(__file__).with_name("rules.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Fires when its signal is at least (or at most) a threshold."""

    name: str
    signal: str
    consider: str
    says: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"rule {self.name!r} needs either at_least or at_most")

    def fires(self, value: float) -> bool:
        """Return whether `value` is at or beyond the threshold."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most

    @property
    def condition(self) -> str:
        """The rule's condition for people."""
        if self.at_least is not None:
            return f"{self.signal} >= {self.at_least:g}"
        return f"{self.signal} <= {self.at_most:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A rule that fired, the evidence, and the models' verdict on its advice."""

    rule: Rule
    value: float
    origin: str
    verdict: str


def load_rules(path: Path = RULES_FILE) -> list[Rule]:
    """Read rules; a malformed one is a ValueError that names it."""
    try:
        found = [_rule(**rule) for rule in json.loads(path.read_text(encoding="utf-8"))["rules"]]
    except FileNotFoundError:
        raise ValueError(f"rules file {path} does not exist") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as rules ({error}); see {RULES_FILE}") from error
    for rule in found:
        _check_signal(rule.signal, f"rule {rule.name!r}: ")
    return found


def _rule(*, seed: str = "", **fields: Any) -> Rule:
    """A rule of a file; `seed` is what files called `says` before."""
    return Rule(**{"says": seed, **fields})


def _check_signal(name: str, where: str = "") -> None:
    if name not in SIGNALS:
        raise ValueError(f"{where}signal {name!r} is unknown; {suggest(name, SIGNALS)}")


def signals(plan: Plan) -> dict[str, float]:
    """Return the signals that the plan has."""
    return {name: of_plan(plan) for name, (of_plan, _) in SIGNALS.items() if of_plan}


def as_given(request: Request, given: Mapping[str, float]) -> Request:
    """Return the request with what the given signals change, so that all of the advice follows."""
    for name in given:
        _check_signal(name)
    changed = request
    if "dataset_samples" in given:
        changed = replace(changed, samples=_count(given, "dataset_samples"))
    if "batch_size" in given:
        size = _count(given, "batch_size")
        changed = replace(changed, batch=size, micro_batch=size)
    jobs = [_count(given, name) for name in ("parallel_jobs", "researchers") if name in given]
    return replace(changed, runs=max(jobs)) if jobs else changed


def _count(given: Mapping[str, float], name: str) -> int:
    if given[name] < 1 or given[name] != int(given[name]):
        raise ValueError(f"{name} is {given[name]:g}; give a whole number from 1")
    return int(given[name])


def fire(
    plan: Plan, rules: list[Rule], given: Mapping[str, float], origin: str = "given"
) -> list[Fired]:
    """Return the rules that fire; given signals replace the plan's."""
    for name in given:
        _check_signal(name)
    values = {name: (value, "predicted") for name, value in signals(plan).items()}
    values |= {name: (value, origin) for name, value in given.items()}
    return [
        Fired(rule=rule, value=value, origin=where, verdict=SIGNALS[rule.signal][1](plan, value))
        for rule in rules
        if rule.signal in values
        for value, where in [values[rule.signal]]
        if rule.fires(value)
    ]
