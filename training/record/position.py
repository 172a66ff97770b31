"""The position of a run: a step boundary without its tensors, as in a checkpoint's JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A step boundary. `step` counts over all Train stages of the run, `stage_step` within one."""

    stage: str
    stage_step: int = 0
    step: int = 0
    has_ended: bool = False  # the stage is complete; its metrics are final
    evaluated_step: int = 0  # stage_step of the last evaluation
    metrics: Mapping[str, float] = field(default_factory=dict)  # of that evaluation
    best: Mapping[str, float] = field(default_factory=dict)  # step and value of the best metric
    results: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of ended stages
    artifacts: Mapping[str, str] = field(default_factory=dict)  # Prepare stage -> key
    facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of stages' starts
    # Stage -> what its code chose at its start that changes the bits; part of the numerics key.
    numerics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    numerics_changed: tuple[str, ...] = ()  # parts of the key that some attempt changed
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # where a stage's went

    def stating(self, facts: Mapping[str, float]) -> "Position":
        """With what the stage's start has found; a resumed stage does not start again."""
        return replace(self, facts={**self.facts, self.stage: facts}) if facts else self

    def timed(self, times: Mapping[str, float]) -> "Position":
        """With where the stage's time went so far, over all attempts."""
        return replace(self, times={**self.times, self.stage: times})

    def choosing(self, chosen: Mapping[str, str]) -> "Position":
        """With what the stage's code has chosen now: its first choice, or changes from that."""
        first = self.numerics.get(self.stage, chosen)
        parts = sorted(n for n in first.keys() | chosen.keys() if first.get(n) != chosen.get(n))
        changed = {*self.numerics_changed, *(f"{self.stage}.{name}" for name in parts)}
        numerics = {**self.numerics, self.stage: first} if first else self.numerics
        return replace(self, numerics=numerics, numerics_changed=tuple(sorted(changed)))

    def to_json(self) -> dict[str, Any]:
        """The record to keep in a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Position":
        """Rebuild from what `to_json` returned."""
        return cls(**{**record, "numerics_changed": tuple(record["numerics_changed"])})
