"""The sample ids of a step as a count and a digest: enough to prove each was seen once per epoch.

The digest is the sum of a 64-bit mix of each id, modulo 2**64. Order does not matter: the sums of
an epoch's steps add up to the sum of all ids. training/engine/step_log.py computes it.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MODULUS = 2**64


@lru_cache(maxsize=64)
def sum_of_all(num_samples: int) -> int:
    """Return the digest of the ids 0 .. num_samples-1 (SplitMix64 of each, Steele et al. 2014)."""
    total = 0
    for index in range(num_samples):
        mixed = (index + 1) * 0x9E3779B97F4A7C15 % MODULUS
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % MODULUS
        total += mixed ^ mixed >> 31
    return total % MODULUS


def lineage_problems(steps: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """List missing steps, and epochs of a stage that did not have each sample exactly once.

    If the stage's number of steps cuts an epoch short, only the number of its samples is known.
    """
    found = []
    missing = sorted(set(range(1, max(steps, default=0) + 1)) - steps.keys())
    if missing:
        found.append(f"steps are missing from the lineage: {missing[:5]}")
    stages: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for line in steps.values():
        stages.setdefault(line["stage"], {}).setdefault(line["epoch"], []).append(line)
    for stage, epochs in stages.items():
        # It may be less than the split: the last, incomplete batch of each epoch is dropped.
        whole = max(sum(line["num_samples"] for line in lines) for lines in epochs.values())
        batch = max(line["num_samples"] for lines in epochs.values() for line in lines)
        for epoch, lines in sorted(epochs.items()):
            count, split = sum(line["num_samples"] for line in lines), lines[0]["split_samples"]
            is_cut = epoch == max(epochs) and all(line["num_samples"] == batch for line in lines)
            where = f"stage {stage!r}, epoch {epoch}: {count} samples of {split}"
            total = sum(int(line["ids_sum"], 16) for line in lines) % MODULUS
            if count > split:
                found.append(f"{where}: some were seen more than once")
            elif count < whole and not is_cut:
                found.append(f"{where}: another epoch had {whole}")
            elif count == split and total != sum_of_all(split):
                found.append(f"{where}: some were seen more than once, others never")
    return found
