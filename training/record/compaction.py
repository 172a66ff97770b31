"""Merges small metrics objects into large compressed ones (contract/metrics.py).

A line is in the store at every moment, also after a kill between the writing of the large object
and the deletion of the small ones. No torch.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

from contract.keys import METRICS
from contract.metrics import MetricsObject, merge, metrics_objects
from training.store.protocol import Store, StoreError, get_each

_log = logging.getLogger(__name__)

# Before compression. A reader has one such object in memory at a time.
_MOST_BYTES = 8 * 1024 * 1024


def compact(store: Store, generation: int, *, least: int = 1) -> None:
    """Merge the small objects of attempts up to `generation`; of that one if it has `least`.

    Never those of a later one: a writer that lost the lease has no say in them. What cannot be done
    now is left to the next call.
    """
    try:
        sizes = store.sizes(METRICS)
        found = [one for one in metrics_objects(sizes) if one.generation <= generation]
        merged_already = _parts_of_merged(found)
        small = [one for one in found if not one.is_merged and one.key not in merged_already]
        if sum(one.generation == generation for one in small) < least:
            small = [one for one in small if one.generation < generation]
        for group in _groups(small, sizes):
            _replace(store, group)
        # Whoever merged them was ended before deleting them.
        store.delete(merged_already)
    except StoreError as error:
        _log.warning(f"[metrics] small objects were not merged: {error}")


def _groups(
    small: Sequence[MetricsObject], sizes: Mapping[str, int]
) -> Iterator[list[MetricsObject]]:
    """Objects that follow each other, in groups of at most `_MOST_BYTES`."""
    group: list[MetricsObject] = []
    size = 0
    for one in small:
        follows = group and (one.writer, one.first) == (group[-1].writer, group[-1].last + 1)
        if group and (not follows or size + sizes[one.key] > _MOST_BYTES):
            yield group
            group, size = [], 0
        group.append(one)
        size += sizes[one.key]
    if group:
        yield group


def _parts_of_merged(found: Sequence[MetricsObject]) -> set[str]:
    """Keys of small objects whose lines a merged one holds."""
    parts: set[str] = set()
    until: dict[str, int] = {}
    for one in found:
        if one.is_merged:
            until[one.writer] = max(one.last, until.get(one.writer, 0))
        elif one.last <= until.get(one.writer, 0):
            parts.add(one.key)
    return parts


def _replace(store: Store, group: list[MetricsObject]) -> None:
    keys = [one.key for one in group]
    contents = [stored.data for stored in get_each(store, keys) if stored is not None]
    if len(contents) == len(group):  # otherwise another writer is merging them
        store.put(*merge(group, contents))
        store.delete(keys)
