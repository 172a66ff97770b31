"""A run in its store: config.json, and its checkpoints, by name or the newest valid one.

config.json says what the run is: written by its first attempt, binding for every later one. If no
checkpoint can be read, this machine ends and not the run: it or its path to the store may be
faulty; once a second machine has found the same, the run starts over. Imports no torch: a machine
that boots into a finished run says so at once.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from contract.errors import UserError
from contract.keys import CONFIG, HEAD
from contract.program import WORKLOAD as PROGRAM
from training.durable.errors import MachineError
from training.durable.record.head import CheckpointEntry, Head, read_head, read_json_record
from training.durable.record.lease import Lease
from training.durable.record.metrics import Events
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store, StoreError, put_unless_changed

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


def parse_prediction(text: str) -> dict[str, float | str] | None:
    """Read `hours_p50=0.2 size=g5.xlarge`; None for an empty text."""
    found: dict[str, float | str] = {}
    for word in text.split():
        name, separator, value = word.partition("=")
        if not separator or not name or not value:
            raise UserError(f"the prediction {word!r} cannot be read; write name=value")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
        else:
            if not 0 <= float(value) < math.inf:
                raise UserError(f"the prediction {word!r} is no amount; give a number from 0")
    return found or None


def planned_price(prediction: Mapping[str, float | str] | None) -> float | None:
    """Return the plan's Spot price per hour in dollars, for its own size, not an alternate one."""
    price = (prediction or {}).get("usd_spot_per_hour")
    return price if isinstance(price, float) and price > 0 else None


def read_run_config(store: Store) -> RunConfig | None:
    """Return the run's record, or None before its first attempt."""
    found = store.get(CONFIG)
    return RunConfig.from_bytes(found.data, f"{store.uri}/{CONFIG}") if found else None


def ensure_run_config(store: Store, mine: RunConfig, placement: frozenset[str]) -> RunConfig:
    """Write the record once; an existing one is binding, and `mine` must agree with it."""
    theirs = read_run_config(store)
    if theirs is None:
        if put_unless_changed(store, CONFIG, mine.to_bytes(), None):
            return mine
        theirs = read_run_config(store)
        assert theirs is not None
    # Batches do not depend on the loader's workers.
    _refuse_other_run(store.uri, theirs, mine, placement | {"loader_workers"})
    return theirs


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts of the key that differ, sorted."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


# Settings of older runs that no longer have an effect.
_GONE = frozenset({"find_unused_parameters"})


def _refuse_other_run(
    uri: str, theirs: RunConfig, mine: RunConfig, placement: frozenset[str]
) -> None:
    placement |= _GONE

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
    now = json.loads(json.dumps(mine.config))
    # A field added after the run began could not be overridden, so it changes nothing.
    later = now.keys() - theirs.config.keys()
    for name in sorted((theirs.config.keys() | now.keys()) - placement - later):
        pairs.append((f"config field {name}", theirs.config.get(name), now.get(name)))
    for what, there, here in pairs:
        if there != here:
            raise UserError(
                f"the run folder {uri} belongs to {what} {_readable(there)}, "
                f"not {_readable(here)}; use another run URI (-c run_id= of a stack), "
                f"or the same {what}"
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


def open_run(uri: str) -> OpenRun:
    """Open the run at `uri`; UserError if there is none."""
    store = open_store(uri)
    head, record = read_head(store), read_run_config(store)
    if head is None or record is None:
        lacks = HEAD if head is None else CONFIG
        raise UserError(f"no run found at {store.uri} (no {lacks}); check the URI")
    return OpenRun(store=store, record=record, head=head)


def find_checkpoint(run: OpenRun, text: str) -> CheckpointEntry:
    """Find the checkpoint named by `newest`, `best`, a step, or the start of its name."""
    entries = run.head.checkpoints
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
        raise UserError(f"the run {run.store.uri} {many} {text!r}; use one of: {choices(run)}")
    return found[0]


def choices(run: OpenRun) -> str:
    """List what `find_checkpoint` accepts for this run."""
    entries = run.head.checkpoints
    best = ["best"] if any(entry.is_best for entry in entries) else []
    steps = dict.fromkeys(str(entry.step) for entry in entries)
    return ", ".join(["newest", *best, *steps]) if steps else "none yet"


_log = logging.getLogger(__name__)

_S = TypeVar("_S")
# After these an older one is tried first; a single failure may have another cause.
_MOST_FAILED_STARTS = 2


class DamagedCheckpointError(RuntimeError):
    """A checkpoint that the head names is missing data or fails its checksums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[_S]):
    """A checkpoint that was read and verified."""

    entry: CheckpointEntry
    content: _S


def read_twice(entry: CheckpointEntry, read: Callable[[], _S]) -> _S:
    """Read a checkpoint or a part of it; if that fails, once more, and then raise."""
    try:
        return read()
    except (DamagedCheckpointError, StoreError) as error:
        _log.warning(f"[read] checkpoint {entry.name}: {error}; reading it again")
        return read()


def newest_valid(
    store: Store, lease: Lease, events: Events, read: Callable[[Store, CheckpointEntry], _S]
) -> tuple[Loaded[_S] | None, tuple[tuple[str, str], ...]]:
    """Find the newest checkpoint whose checksums match, and those passed over as (name, why).

    None if the run starts over, or for the first time. If none can be read: StoreError if the store
    refused one of them, MachineError if this machine is the first to find them damaged.
    """
    entries = [entry for entry in lease.head.checkpoints if not entry.is_left_behind]
    if _are_useless(entries):
        given_up = tuple((entry.name, _why_given_up(entry)) for entry in reversed(entries))
        about = [{"name": name, "why": why} for name, why in given_up]
        events.emit("none-valid", "failed", passed_over=about, starts_over=True)
        _log.warning(
            "[resume] any snapshot so far may hold only half of a save, and the program has failed "
            "twice on each: starting over"
        )
        lease.start_over()
        return None, given_up
    found, passed_over = _first_valid(store, entries, read)
    for name, why in passed_over:
        _log.warning("[resume] passed over checkpoint %s: %s", name, why)
    if found is not None:
        lease.forget_unverified()
    elif passed_over:
        starts_over = lease.count_unverified()
        about = [{"name": name, "why": why} for name, why in passed_over]
        events.emit("none-valid", "failed", passed_over=about, starts_over=starts_over)
        if not starts_over:
            raise MachineError(_none_valid(store, passed_over))
        _log.warning("[resume] another machine could verify none of them either: starting over")
    return found, passed_over


def _none_valid(store: Store, passed_over: Sequence[tuple[str, str]]) -> str:
    name, why = passed_over[0]
    return (
        f"none of the {len(passed_over)} checkpoints of {store.uri} can be verified on this "
        f"machine (the newest, {name}: {why}); all of them are kept, and the run starts over only "
        "if another machine cannot verify them either; to start over at once: "
        f"python -m training reopen --from-scratch --run-uri {store.uri}"
    )


def _first_valid(
    store: Store, entries: Sequence[CheckpointEntry], read: Callable[[Store, CheckpointEntry], _S]
) -> tuple[Loaded[_S] | None, tuple[tuple[str, str], ...]]:
    passed_over: list[tuple[str, str]] = []
    refused: list[StoreError] = []
    given_up = {entry.name: entry for entry in entries if _is_given_up(entry)}
    ordered = [*given_up.values(), *(entry for entry in entries if entry.name not in given_up)]
    for entry in reversed(ordered):
        try:
            content = read(store, entry)
        except (DamagedCheckpointError, StoreError) as error:
            passed_over.append((entry.name, str(error)))
            if isinstance(error, StoreError):
                refused.append(error)
            continue
        if entry.name not in given_up:
            passed_over += [(name, _why_given_up(one)) for name, one in given_up.items()]
        return Loaded(entry=entry, content=content), tuple(passed_over)
    if refused:
        raise StoreError(
            f"no checkpoint of {store.uri} can be read: {refused[0]}; "
            "the run is kept; start it again once they can be read"
        )
    return None, tuple(passed_over)


def _are_useless(entries: Sequence[CheckpointEntry]) -> bool:
    """Whether all that the run has ever saved may be half of a save, and the program fails on it.

    If others have been deleted since, more work than that of a first save would be lost.
    """
    are_all = bool(entries) and entries[-1].step == len(entries)
    return are_all and all(entry.is_tentative and _is_given_up(entry) for entry in entries)


def _is_given_up(entry: CheckpointEntry) -> bool:
    return entry.failed_starts >= _MOST_FAILED_STARTS


def _why_given_up(entry: CheckpointEntry) -> str:
    return f"the program failed {entry.failed_starts} times while it read it"
