"""Names of derived data. Imports no torch."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def artifact_key(facts: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that stand for everything that an artifact's shards depend on.

    `facts` can be written as JSON: weights, preprocessing, a version of the code, the number of
    shards, the dataset's fingerprint. Equal facts in any order are the same artifact.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
