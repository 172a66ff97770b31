"""Keys that identify derived data. Imports no torch."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def artifact_key(facts: Mapping[str, Any]) -> str:
    """Hash everything that an artifact's shards depend on into 32 hexadecimal digits.

    `facts` must be JSON-serializable: weights, preprocessing, a version of the code, the number of
    shards, the dataset's fingerprint. The order of the facts does not matter.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
