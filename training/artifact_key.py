"""Keys that identify derived data. Imports no torch."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def key_of(facts: Mapping[str, Any]) -> str:
    """Hash everything that an artifact's shards depend on into 32 hexadecimal digits.

    `facts` must be JSON-serializable: weights, preprocessing, a version of the code, the number of
    shards, the dataset's fingerprint. The order of the facts does not matter.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


# What workloads of one's own import: its name before the door of `training` had one.
artifact_key = key_of
