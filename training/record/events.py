"""Events: what happened to a run, one small JSON object each under events/. Imports no torch."""

import json
from datetime import UTC, datetime

from contract.keys import EVENTS
from training.store.protocol import Store, StoreError


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
            # An event is a witness; the run does not depend on it.
            print(f"[events] {name} was not written: {error}", flush=True)


class SilentEvents(Events):
    """Those of a rank above 0: rank 0 tells what happens to the run."""

    def __init__(self) -> None:
        """Nothing is written anywhere."""

    def emit(self, name: str, status: str = "info", **fields: object) -> None:
        """No-op."""
