"""The fields of a step line that stand for its sample ids (contract/samples.py). Microseconds."""

import zlib
from typing import Any

import numpy as np


def sample_digest(ids: Any, split_samples: int) -> dict[str, int | str]:
    """Count and digests of a step's ids (integers in any sequence), and how many its split has.

    `ids_sum` is the same in any order, `ids_crc` is not.
    """
    array = np.asarray(ids, dtype=np.uint64)
    mixed = (array + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    total = int((mixed ^ mixed >> np.uint64(31)).sum())
    return {
        "num_samples": len(array),
        "split_samples": split_samples,
        "ids_sum": f"{total:016x}",
        "ids_crc": f"{zlib.crc32(array.astype('<u8').tobytes()):08x}",
    }
