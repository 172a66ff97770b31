"""Each metrics line is read once, while objects are written, merged, deleted and damaged."""

import json
from collections.abc import Iterable, Iterator, Sequence

import pytest

from contract.metrics import LineReader, merge, metrics_objects, small_key

WRITER = "0001-aa"


def lines(*numbers: int, generation: int = 1) -> bytes:
    records = [{"kind": "note", "generation": generation, "number": number} for number in numbers]
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


class Objects:
    """A store in memory, and a reader of it; `listings` are what it gets instead, in turn."""

    def __init__(self, **contents: bytes) -> None:
        self.found = dict(contents)
        self.listings: list[Iterable[str]] = []
        self.reader = LineReader(self._names, self._read)

    def put(self, number: int, *numbers: int, writer: str = WRITER) -> None:
        generation = int(writer.partition("-")[0])
        self.found[small_key(writer, number)] = lines(*numbers, generation=generation)

    def merge(self, first: int, last: int, *, deletes: bool = True) -> str:
        keys = [small_key(WRITER, number) for number in range(first, last + 1)]
        name, data = merge(metrics_objects(keys), [self.found[key] for key in keys])
        self.found[name] = data
        if deletes:
            for key in keys:
                del self.found[key]
        return name

    def _names(self) -> Iterable[str]:
        return self.listings.pop(0) if self.listings else list(self.found)

    def _read(self, keys: Sequence[str]) -> Iterator[bytes | None]:
        return map(self.found.get, keys)

    def new(self, *, is_last: bool = True) -> list[int]:
        return [line["number"] for line in self.reader.new(is_last=is_last)]


@pytest.fixture
def objects() -> Objects:
    objects = Objects()
    for number in range(1, 7):
        objects.put(number, 2 * number, 2 * number + 1)
    return objects


def test_merged_objects_are_read_in_place_of_their_parts(objects: Objects) -> None:
    objects.merge(1, 3)
    objects.merge(4, 5, deletes=False)  # as after a kill before the deletion
    assert objects.new() == list(range(2, 14))
    assert objects.new() == []


def test_a_merged_object_that_overlaps_another_gives_the_rest(objects: Objects) -> None:
    objects.merge(1, 4, deletes=False)
    objects.merge(3, 6)
    assert objects.new() == list(range(2, 14))


def test_parts_of_what_was_read_before_are_skipped_after_a_merge(objects: Objects) -> None:
    del objects.found[small_key(WRITER, 6)]
    assert objects.new() == list(range(2, 12))
    objects.put(6, 12, 13)
    objects.merge(2, 6)
    assert objects.new() == [12, 13]


def test_objects_merged_since_they_were_listed_are_found(objects: Objects) -> None:
    before = list(objects.found)
    objects.merge(1, 6)
    objects.listings = [before, before]
    assert objects.new() == list(range(2, 14))


def test_a_listing_during_a_merge_may_miss_both(objects: Objects) -> None:
    """It passed the merged object's name before it was there, and the parts' names after."""
    objects.merge(1, 6)
    objects.listings = [[]]
    assert objects.new() == list(range(2, 14))


def test_an_object_that_is_listed_and_never_there_ends_no_reader(objects: Objects) -> None:
    gone = small_key(WRITER, 2)
    names = list(objects.found)
    del objects.found[gone]
    objects.listings = [names] * 8
    assert objects.new() == [2, 3, *range(6, 14)]


def test_nothing_behind_a_missing_number_is_read_before_the_last_call(objects: Objects) -> None:
    del objects.found[small_key(WRITER, 3)]
    assert objects.new(is_last=False) == [2, 3, 4, 5]
    objects.put(3, 6, 7)
    assert objects.new(is_last=False) == list(range(6, 14))
    objects.put(9, 18)
    assert objects.new(is_last=False) == []
    assert objects.new() == [18]


def test_attempts_come_in_the_order_of_their_generations() -> None:
    objects = Objects()
    for writer in ("10000-b", "0002-a", "0010-c"):
        objects.put(1, int(writer.partition("-")[0]), writer=writer)
    assert objects.new() == [2, 10, 10000]


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "note", "gener',
        b"\xff\x00\x80",
        b"[1]",
        b'{"kind": "step", "generation": 1, "stage": "a"}',
        b'{"kind": "evaluation", "generation": 1, "step": 1, "stage": "a", "metrics": 3}',
    ],
)
def test_a_damaged_line_is_passed_over(objects: Objects, line: bytes) -> None:
    objects.found[small_key(WRITER, 2)] = lines(4) + line
    assert objects.new() == [2, 3, 4, *range(6, 14)]
    assert objects.reader.passed_over == [f"{small_key(WRITER, 2)}: 1 damaged line"]


@pytest.mark.parametrize("damaged", ["cut", "flipped", "empty"])
def test_a_damaged_merged_object_is_passed_over_with_its_lines(
    objects: Objects, damaged: str
) -> None:
    name = objects.merge(2, 4)
    data = bytearray(objects.found[name])
    data[len(data) // 2] ^= 1
    half = bytes(data[: len(data) // 2])
    objects.found[name] = {"cut": half, "flipped": bytes(data), "empty": b""}[damaged]
    assert objects.new() == [2, 3, *range(10, 14)]
    (passed_over,) = objects.reader.passed_over
    assert passed_over.startswith(f"{name}: damaged (")
    assert passed_over.endswith("with its 6 lines")


def test_a_damaged_part_keeps_its_place_in_a_merged_object(objects: Objects) -> None:
    objects.found[small_key(WRITER, 2)] = b"\n\n\ntorn\n\n" + lines(4)
    objects.found[small_key(WRITER, 3)] = b""
    assert objects.new() == [2, 3, 4, *range(8, 14)]
    again = Objects(**objects.found)
    again.merge(1, 2, deletes=False)
    again.merge(1, 6)
    assert again.new() == [2, 3, 4, *range(8, 14)]
