"""A candidate that waits for the lease says so; whoever trains on in a notice then ends sooner.

One small object below the run, which names the generation whose holder is waited for: one that an
earlier candidate has left says nothing. Imports no torch.
"""

import json
import threading
from typing import TYPE_CHECKING

from training.store import Store, StoreError

if TYPE_CHECKING:
    from training.extra_time import ExtraTime

WAITING = "waiting.json"
_POLL_SECONDS = 2.0


def say_waiting(store: Store, generation: int, writer: str) -> None:
    """Leave the wish for the lease of this generation; that it may not arrive costs seconds."""
    record = {"generation": generation, "writer": writer}
    try:
        store.put(WAITING, json.dumps(record).encode())
    except StoreError as error:
        print(f"[lease] the holder was not told that somebody waits: {error}", flush=True)


def is_waited_for(store: Store, generation: int) -> bool:
    """Whether somebody has said that they wait for this generation's holder."""
    try:
        found = store.get(WAITING)
        return found is not None and json.loads(found.data)["generation"] == generation
    except (StoreError, ValueError, KeyError, TypeError):
        return False


def watch_for_candidates(store: Store, generation: int, extra_time: "ExtraTime") -> None:
    """Look from a thread of its own, until somebody waits or the attempt ends."""

    def watch() -> None:
        while not is_waited_for(store, generation):
            if extra_time.ended.wait(_POLL_SECONDS):
                return
        print("[notice] another machine waits for the lease", flush=True)
        extra_time.is_wanted = True

    threading.Thread(target=watch, name="candidates", daemon=True).start()
