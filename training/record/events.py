"""Events: what happened to a run, one small JSON object each under events/. Imports no torch."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from contract.keys import EVENTS
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)


class Events:
    """Writes events under one writer's name. An event that cannot be written is only logged."""

    def __init__(self, store: Store, writer: str) -> None:
        self._store = store
        self._writer = writer

    def emit(self, name: str, status: str = "info", **fields: object) -> None:
        """Write the event `name`; status is ok, failed or info."""
        now = datetime.now(UTC)
        record = {
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "instance_id": self._writer,
            "name": name,
            "status": status,
            "source": "trainer",
            **fields,
        }
        key = f"{EVENTS}{now.strftime('%Y%m%dT%H%M%S.%fZ')}-{self._writer}-{name}.json"
        try:
            self._store.put(key, json.dumps(record, allow_nan=False).encode())
        except StoreError as error:
            # The run does not depend on its events.
            _log.warning(f"[events] {name} was not written: {error}")


class SilentEvents(Events):
    """The events of a rank above 0: dropped, as rank 0 writes those of the run."""

    def __init__(self) -> None:
        """Needs no store."""

    def emit(self, name: str, status: str = "info", **fields: object) -> None:
        """No-op."""


def read_events(store: Store, name: str) -> list[dict[str, Any]]:
    """The run's events of this name, the oldest first; ValueError for one that is damaged."""
    keys = sorted(key for key in store.sizes(EVENTS) if key.endswith(f"-{name}.json"))
    found = [json.loads(one.data) for one in map(store.get, keys) if one]
    # `save-failed` ends as `failed` does.
    return [event for event in found if event["name"] == name]
