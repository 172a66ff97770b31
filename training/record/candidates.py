"""A candidate that waits for the lease says so; whoever trains on in a notice then ends sooner.

One small object below the run, which names the generation whose holder is waited for: one that an
earlier candidate has left says nothing. Imports no torch.
"""

import json

from contract.keys import WAITING
from training.store.protocol import Store, StoreError


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
