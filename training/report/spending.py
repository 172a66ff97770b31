"""What the run has cost by market: the Guard counts it in guard.json, a trainer knows no price."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from contract.keys import GUARD
from training.store.protocol import Store

_log = logging.getLogger(__name__)


def read_spending(store: Store) -> dict[str, Any] | None:
    """Return dollars and hours by market at the Guard's last call; None where there is no Guard.

    `moves` is how often the run went on demand or back.
    """
    found = store.get(GUARD)
    if found is None:
        return None
    try:
        document = json.loads(found.data)
        billed: Mapping[str, Mapping[str, float]] = document["billed"]
        return {
            "usd": round(sum(each["usd"] for each in billed.values()), 4),
            "by_market": {market: dict(each) for market, each in billed.items()},
            "moves": int(document.get("market", {}).get("moves", 0)),
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        # An older Guard's, or a damaged one: nothing of the run depends on it.
        _log.warning(f"{GUARD} does not say what was spent; the receipt leaves it out")
        return None
