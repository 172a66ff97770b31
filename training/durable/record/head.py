"""head.json: the lease on a run and its list of committed checkpoints, in one object.

Every change is one conditional write with its own nonce, so the store itself refuses a stale
writer. No two machines' clocks are compared, and safety never depends on the TTL. A name or number
that no writer wrote is refused: names become the keys that are read and deleted. Imports no torch.
"""

import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from contract.errors import UserError
from contract.grammar import Span
from contract.keys import CHECKPOINT_NAME, HEAD, WAITING
from training.durable.store.protocol import (
    PreconditionFailedError,
    Store,
    StoreError,
    put_unless_changed,
)
from training.durable.store.transfer import FileEntry, refuse_other_than_counts

_log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["periodic", "best", "emergency", "rebalance", "stage-end"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One committed checkpoint. `step` counts over all Train stages of the run, so names sort."""

    name: str
    step: int
    stage: str
    epoch: int
    kind: Kind
    files: tuple[FileEntry, ...]
    is_best: bool = False  # the best by its stage's best_metric when it was evaluated
    # What its stage still needed at its writer's pace, for the Guard; None: not known yet.
    seconds_left: float | None = None
    # Taken when a program ended after a notice, or was stopped: it may hold half of a save.
    is_tentative: bool = False
    failed_starts: int = 0  # programs that began with it, and failed while they read it
    is_left_behind: bool = False  # the run has started over: no attempt resumes from it
    program_step: int | None = None  # what a program had reported when it was taken

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "CheckpointEntry":
        """Read what `asdict` returned; ValueError or TypeError for anything else."""
        if not CHECKPOINT_NAME.fullmatch(record["name"]):
            raise ValueError(f"the checkpoint name {record['name']!r} was not written by a trainer")
        refuse_other_than_counts(record, "step", "epoch", "failed_starts")
        if record.get("program_step") is not None:
            refuse_other_than_counts(record, "program_step")
        if record["kind"] not in get_args(Kind):
            raise ValueError(f"{record['name']} has the unknown kind {record['kind']!r}")
        files = tuple(FileEntry.from_json(file) for file in record["files"])
        return cls(**{**record, "files": files})


def checkpoint_name(step: int, generation: int) -> str:
    """Return a unique name that sorts by step."""
    return f"{step:08d}-g{generation:04d}-{secrets.token_hex(8)}"


def step_of(name: str) -> int:
    """Return the step in a name that `checkpoint_name` made."""
    return int(name.partition("-")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """The checkpoints to keep; others are deleted after they leave the head.

    The newest and the furthest stay, every Nth, the best, and the stage ends they need; one that
    may hold half of a save never takes the place of one that does not. Those from before the run
    started over stay until there are more new ones than are kept, and for good the newest whole
    one that a program could not read.
    """

    newest: int = 3
    every: Span | None = None

    def kept(self, entries: Sequence[CheckpointEntry]) -> tuple[CheckpointEntry, ...]:
        """Return the checkpoints to keep; both sequences are oldest first."""
        left_behind = [entry for entry in entries if entry.is_left_behind]
        checkpoints = [entry for entry in entries if not entry.is_left_behind]
        # A stage's later best is better: it was compared with the earlier one.
        best = {entry.stage: entry for entry in checkpoints if entry.is_best}
        firm = [entry for entry in checkpoints if not entry.is_tentative]
        newest = [*firm[-self.newest :], *checkpoints[-self.newest :]]
        # Newer ones may reach less far: a machine could not read the furthest and passed it over,
        # or a program began again on a torn save without noticing.
        furthest = [*_furthest(firm), *_furthest(checkpoints)]
        chosen = [*newest, *furthest, *best.values(), *self._every(checkpoints)]
        names = {entry.name for entry in chosen}
        if len(firm) <= self.newest:
            names.update(entry.name for entry in left_behind)
        # No user has asked to leave behind what a program could not read.
        unread = [e for e in left_behind if e.failed_starts and not e.is_tentative]
        names.update(entry.name for entry in unread[-1:])
        for entry in chosen:
            earlier = checkpoints[: checkpoints.index(entry)]
            ends = [e for e in earlier if e.kind == "stage-end" and e.stage != entry.stage]
            names.update(end.name for end in ends[-1:])
        return tuple(entry for entry in entries if entry.name in names)

    def _every(self, checkpoints: Sequence[CheckpointEntry]) -> Iterator[CheckpointEntry]:
        if self.every is None:
            return
        seen: set[tuple[str, int]] = set()
        for entry in checkpoints:
            is_epochs = self.every.unit == "epochs"
            number = (entry.epoch if is_epochs else entry.step) // self.every.value
            key = (entry.stage if is_epochs else "", number)
            if number > 0 and key not in seen:
                seen.add(key)
                yield entry


def _furthest(checkpoints: Sequence[CheckpointEntry]) -> Sequence[CheckpointEntry]:
    """Return the last one with the furthest step: a program's own, if it reports steps."""
    steps = [(entry.program_step, entry) for entry in checkpoints]
    known = [(step, entry) for step, entry in steps if step is not None]
    reached = known or [(entry.step, entry) for entry in checkpoints]
    return [entry for _, entry in sorted(reached, key=lambda one: one[0])[-1:]]


KEEP_NEWEST = Retention()


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


# Format 2 added part_bytes to files and is_best to checkpoints, format 3 seconds_left to them,
# format 4 is_tentative and failed_starts, format 5 is_left_behind, unverified_by and program_step,
# format 6 xxh128 to files.
_FORMAT, _WITHOUT_XXH128 = 6, 5

State: TypeAlias = Literal["running", "released", "finished", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The content of head.json; checkpoints oldest first."""

    run_id: str
    generation: int
    writer: str
    nonce: str
    heartbeat: int = 0
    state: State = "running"
    reason: str | None = None
    weights_sha256: str | None = None
    checkpoints: tuple[CheckpointEntry, ...] = ()
    skipped_steps: tuple[int, ...] = ()  # they diverged: no attempt trains on them
    unverified_by: tuple[str, ...] = ()  # machines that could use none of the checkpoints

    @property
    def is_ended(self) -> bool:
        """Whether the run has finished or failed for good."""
        return self.state in ("finished", "failed")

    def end_of(self, stage: str) -> CheckpointEntry | None:
        """Return the last committed end of a stage, if it is still kept."""
        ends = (e for e in reversed(self.checkpoints) if e.stage == stage and e.kind == "stage-end")
        return next(ends, None)

    def renewed(self) -> "Head":
        """Return it with another heartbeat, unless the run is not held."""
        return self if self.state != "running" else replace(self, heartbeat=self.heartbeat + 1)

    def released(self) -> "Head":
        """Return it without a holder, unless the run has ended."""
        return replace(self, state="released") if self.state == "running" else self

    def started_over(self) -> "Head":
        """Return it with no checkpoint to resume from; it names them until retention drops them."""
        left = tuple(replace(entry, is_left_behind=True) for entry in self.checkpoints)
        return replace(self, checkpoints=left, unverified_by=())

    def to_bytes(self) -> bytes:
        """Return the JSON to store, in the oldest format that holds it: older bundles read that."""
        record, number = asdict(self), _FORMAT
        files = [file for entry in record["checkpoints"] for file in entry["files"]]
        if not any(file["xxh128"] for file in files):
            number = _WITHOUT_XXH128
            for file in files:
                del file["xxh128"]
        return json.dumps({"format": number, **record}, indent=1).encode()

    @classmethod
    def read(cls, store: Store) -> "Head | None":
        """Return the run's current head, or None before the first attempt."""
        return cls.find(store)[0]

    @classmethod
    def find(cls, store: Store) -> "tuple[Head | None, str | None]":
        """Return the current head and its ETag; None and None before the first attempt."""
        found = store.get(HEAD)
        if found is None:
            return None, None
        return cls.from_bytes(found.data, f"{store.uri}/{HEAD}"), found.etag

    def write(self, store: Store, etag: str | None) -> str:
        """Write it if the head's ETag is `etag`; if refused or unanswered, its nonce decides."""
        now = put_unless_changed(store, HEAD, self.to_bytes(), etag)
        if now is None:
            raise PreconditionFailedError(f"{store.uri}/{HEAD} has changed")
        return now

    @classmethod
    def from_bytes(cls, data: bytes, name: str = HEAD) -> "Head":
        """Parse what `to_bytes` wrote; errors call it `name`."""
        return read_json_record(name, data, _FORMAT, cls._from_record)

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> "Head":
        checkpoints = tuple(map(CheckpointEntry.from_json, record.pop("checkpoints")))
        skipped = tuple(record.pop("skipped_steps", ()))
        unverified_by = tuple(record.pop("unverified_by", ()))
        counts = Counter(entry.name for entry in checkpoints)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{twice[0]} is named twice")
        refuse_other_than_counts(record, "generation", "heartbeat")
        if any(type(step) is not int for step in skipped):
            raise ValueError(f"the skipped steps are {skipped}")
        if record["state"] not in get_args(State):
            raise ValueError(f"the state {record['state']!r} is unknown")
        return cls(
            **record, checkpoints=checkpoints, skipped_steps=skipped, unverified_by=unverified_by
        )


def announce_waiting(store: Store, generation: int, writer: str) -> None:
    """Announce that `writer` waits for this generation's holder; a failure costs only seconds."""
    record = {"generation": generation, "writer": writer}
    try:
        store.put(WAITING, json.dumps(record).encode())
    except StoreError as error:
        _log.warning(f"[lease] could not notify the holder that this machine is waiting: {error}")


def is_waited_for(store: Store, generation: int) -> bool:
    """Whether a candidate waits for this generation's holder, not for an earlier one."""
    try:
        found = store.get(WAITING)
        return found is not None and json.loads(found.data)["generation"] == generation
    except (StoreError, ValueError, KeyError, TypeError):
        return False


def new_nonce() -> str:
    return secrets.token_hex(8)


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
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # stage -> where it went

    @property
    def is_best(self) -> bool:
        """Whether its evaluation is the best of its stage so far."""
        return self.best.get("step") == self.step

    def stating(self, facts: Mapping[str, float]) -> "Position":
        """Add what the stage's start has found; a resumed stage does not start again."""
        return replace(self, facts={**self.facts, self.stage: facts}) if facts else self

    def timed(self, times: Mapping[str, float]) -> "Position":
        """Set where the stage's time went so far, over all attempts."""
        return replace(self, times={**self.times, self.stage: times})

    def choosing(self, chosen: Mapping[str, str]) -> "Position":
        """Add what the stage's code has chosen now: its first choice, or changes from that."""
        first = self.numerics.get(self.stage, chosen)
        parts = sorted(n for n in first.keys() | chosen.keys() if first.get(n) != chosen.get(n))
        changed = {*self.numerics_changed, *(f"{self.stage}.{name}" for name in parts)}
        numerics = {**self.numerics, self.stage: first} if first else self.numerics
        return replace(self, numerics=numerics, numerics_changed=tuple(sorted(changed)))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Position":
        """Rebuild from what `asdict` returned."""
        return cls(**{**record, "numerics_changed": tuple(record["numerics_changed"])})
