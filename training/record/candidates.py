"""A candidate that waits for the lease says so; a holder that trains on after a notice then stops.

One small object below the run names the generation whose holder is waited for, so one left by an
earlier candidate is ignored. Imports no torch.
"""

import json
import logging

from contract.keys import WAITING
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)


def say_waiting(store: Store, generation: int, writer: str) -> None:
    """Say that `writer` waits for the holder of this generation; a failure costs only seconds."""
    record = {"generation": generation, "writer": writer}
    try:
        store.put(WAITING, json.dumps(record).encode())
    except StoreError as error:
        _log.warning(f"[lease] could not tell the holder that this machine waits: {error}")


def is_waited_for(store: Store, generation: int) -> bool:
    """Whether a candidate waits for this generation's holder."""
    try:
        found = store.get(WAITING)
        return found is not None and json.loads(found.data)["generation"] == generation
    except (StoreError, ValueError, KeyError, TypeError):
        return False
