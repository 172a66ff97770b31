"""A run in its store: config.json, and the run as commands open it, with its checkpoints by name.

config.json identifies the run: written by its first attempt, binding for every later one. Imports
no torch: a machine that boots into a finished run reports that at once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from contract.errors import UserError
from contract.keys import CONFIG, FINAL_FILES, HEAD
from contract.program import WORKLOAD as PROGRAM
from training.durable.record.head import CheckpointEntry, Head, read_json_record
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store, put_unless_changed

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The content of config.json."""

    run_id: str
    workload: str
    recipe: str
    overrides: Mapping[str, str]
    config: Mapping[str, Any]
    dataset: str  # the manifest's fingerprint
    bundle_uri: str | None
    numerics_key: Mapping[str, Any]
    writer: str
    created_at: str
    # training.engine.job.Origin, if the run starts from other weights.
    origin: Mapping[str, Any] | None = None
    # What the dataset decides besides the overrides, such as its number of classes.
    fitted: Mapping[str, str] = field(default_factory=dict)
    prediction: Mapping[str, float | str] | None = None  # from the plan, for `sizing plan --run`

    @property
    def all_overrides(self) -> dict[str, str]:
        """The overrides that its config has: the dataset's, then the requested ones."""
        return {**self.fitted, **self.overrides}

    def to_bytes(self) -> bytes:
        """Return the JSON to store."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str = CONFIG) -> "RunConfig":
        """Parse what `to_bytes` wrote; errors call it `name`."""
        return read_json_record(name, data, _FORMAT, lambda record: cls(**record))

    @classmethod
    def read(cls, store: Store) -> "RunConfig | None":
        """Return the run's record, or None before its first attempt."""
        found = store.get(CONFIG)
        return cls.from_bytes(found.data, f"{store.uri}/{CONFIG}") if found else None

    def changed_numerics(self, now: Mapping[str, Any]) -> list[str]:
        """Return the names of the parts of the numerics key that differ now, sorted."""
        before = self.numerics_key
        return sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))

    def changed_config(self, now: Mapping[str, Any], apart: frozenset[str]) -> dict[str, Any]:
        """Return what it recorded of the fields that are others or gone now, besides `apart`.

        A field added after the run began could not be overridden, so it changes nothing.
        """
        apart, now = apart | _INDECISIVE, json.loads(json.dumps(now))
        return {n: v for n, v in self.config.items() if n not in apart and now.get(n, ...) != v}


def ensure_run_config(store: Store, mine: RunConfig, placement: frozenset[str]) -> RunConfig:
    """Write the record once; an existing one is binding, and `mine` must agree with it."""
    theirs = RunConfig.read(store)
    if theirs is None:
        if put_unless_changed(store, CONFIG, mine.to_bytes(), None):
            return mine
        theirs = RunConfig.read(store)
        assert theirs is not None
    _refuse_other_run(store.uri, theirs, mine, placement | _INDECISIVE)
    return theirs


# Batches do not depend on the loader's workers; the other is gone, but older runs may have it.
_INDECISIVE = frozenset({"loader_workers", "find_unused_parameters"})


def _refuse_other_run(
    uri: str, theirs: RunConfig, mine: RunConfig, placement: frozenset[str]
) -> None:

    def decisive(overrides: Mapping[str, str]) -> dict[str, str]:
        plain = {name.removeprefix("settings."): text for name, text in overrides.items()}
        return {name: text for name, text in plain.items() if name not in placement}

    pairs: list[tuple[str, Any, Any]] = [
        ("run id", theirs.run_id, mine.run_id),
        ("workload", theirs.workload, mine.workload),
        ("recipe", theirs.recipe, mine.recipe),
        ("overrides", decisive(theirs.overrides), decisive(mine.overrides)),
        ("dataset", theirs.dataset, mine.dataset),
        ("origin", theirs.origin, mine.origin),
    ]
    for name, value in sorted(theirs.changed_config(mine.config, placement).items()):
        pairs.append((f"config field {name}", value, mine.config.get(name)))
    for what, there, here in pairs:
        if there != here:
            longer = f"; with --init-from {uri} that one begins with this one's newest snapshot"
            raise UserError(
                f"the run folder {uri} belongs to {what} {_readable(there)}, "
                f"not {_readable(here)}; use another run URI (-c run_id= of a stack), "
                f"or the same {what}{longer if mine.workload == PROGRAM else ''}"
            )


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={text}" for name, text in sorted(value.items())) or "(none)"
    return repr(value)


def now_utc() -> str:
    """Return this machine's time, for people; never compared with another machine's clock."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """A run as it is now."""

    store: Store
    record: RunConfig
    head: Head

    @property
    def is_of_program(self) -> bool:
        """Whether its checkpoints are snapshots of a program's folder."""
        return self.record.workload == PROGRAM

    @classmethod
    def at(cls, uri: str) -> "OpenRun":
        """Open the run at `uri`; UserError if there is none."""
        store = open_store(uri)
        head, record = Head.read(store), RunConfig.read(store)
        if head is None or record is None:
            lacks = HEAD if head is None else CONFIG
            raise UserError(f"no run found at {store.uri} (no {lacks}); check the URI")
        return cls(store=store, record=record, head=head)

    @classmethod
    def of_workload(cls, uri: str) -> "OpenRun":
        """Open the run of a workload at `uri`; UserError if it is something else."""
        run = cls.at(uri)
        if run.is_of_program:
            raise UserError(
                f"{run.store.uri} is the run of a program, whose weights only the program can "
                f"read; what it left in model/ is in {run.store.uri}/{FINAL_FILES}model/"
            )
        return run

    def find_checkpoint(self, text: str) -> CheckpointEntry:
        """Find the checkpoint named by `newest`, `best`, a step, or the start of its name."""
        entries = self.head.checkpoints
        if text == "newest":
            found: Sequence[CheckpointEntry] = entries[-1:]
        elif text == "best":
            # A stage's later best is better: it was compared with the earlier one.
            found = [entry for entry in entries if entry.is_best][-1:]
        elif text.isdecimal() and len(text) < 8:
            # A stage's last step may have two: the newer one includes the evaluation.
            found = [entry for entry in entries if entry.step == int(text)][-1:]
        else:
            found = [entry for entry in entries if entry.name.startswith(text)]
        if len(found) != 1:
            many = f"has {len(found)} checkpoints" if found else "has no checkpoint"
            raise UserError(f"the run {self.store.uri} {many} {text!r}; use one of: {self.choices}")
        return found[0]

    @property
    def choices(self) -> str:
        """List what `find_checkpoint` accepts for this run."""
        entries = self.head.checkpoints
        best = ["best"] if any(entry.is_best for entry in entries) else []
        steps = dict.fromkeys(str(entry.step) for entry in entries)
        return ", ".join(["newest", *best, *steps]) if steps else "none yet"
