"""config.json: what a run is. Written by its first attempt, binding for every later one.

Imports no torch: a machine that boots into a finished run says so at once.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from contract.errors import UserError
from contract.keys import CONFIG
from training.durable.record.head import read_json_record
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


def ensure_run_config(store: Store, mine: RunConfig, placement: frozenset[str]) -> RunConfig:
    """Write the record once; an existing one is binding, and `mine` must agree with it."""
    theirs = RunConfig.read(store)
    if theirs is None:
        if put_unless_changed(store, CONFIG, mine.to_bytes(), None):
            return mine
        theirs = RunConfig.read(store)
        assert theirs is not None
    # Batches do not depend on the loader's workers.
    _refuse_other_run(store.uri, theirs, mine, placement | {"loader_workers"})
    return theirs


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
