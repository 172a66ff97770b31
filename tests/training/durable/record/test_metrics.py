"""Lines reach the store in order, and writing them waits for nobody."""

import json
import resource
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from contract.metrics import metrics_objects, small_key
from training.durable.record.history import History
from training.durable.record.metrics import Metrics, compact
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Store, StoreError


class HeldStore(FolderStore):
    """A folder whose writes wait for a gate, or fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.error: StoreError | None = None

    def put(self, key: str, data: bytes) -> None:
        assert self.gate.wait(120)
        if self.error:
            raise self.error
        super().put(key, data)


def lines_in(store: FolderStore) -> list[str]:
    found = [store.get(key) for key in sorted(store.sizes("metrics/"))]
    return [line for one in found if one for line in one.data.decode().splitlines()]


def test_a_line_is_written_while_others_are_on_their_way(tmp_path: Path) -> None:
    store = HeldStore(tmp_path)
    metrics = Metrics(store, 1, "n", None)
    metrics.write("step", step=1)
    flushing = threading.Thread(target=metrics.flush)
    flushing.start()
    metrics.write("step", step=2)  # hangs here if the flush blocks it
    assert flushing.is_alive()
    store.gate.set()
    flushing.join(120)
    assert not flushing.is_alive()
    assert lines_in(store) == ['{"kind":"step","step":1,"generation":1}']
    metrics.flush()
    assert len(lines_in(store)) == 2
    metrics.close()


def test_a_flush_waits_for_what_was_sent_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.record.metrics._FLUSH_SECONDS", 0.0)
    store = HeldStore(tmp_path)
    metrics = Metrics(store, 1, "n", None)
    for step in range(5):
        metrics.write("step", step=step)
    threading.Timer(0.1, store.gate.set).start()
    metrics.flush()
    assert [f'"step":{step},' in line for step, line in enumerate(lines_in(store))] == [True] * 5
    metrics.close()


def test_fails_at_the_flush_of_a_line_that_could_not_be_sent_and_sends_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.record.metrics._FLUSH_SECONDS", 0.0)
    store = HeldStore(tmp_path)
    store.error = StoreError("no answer")
    store.gate.set()
    metrics = Metrics(store, 1, "n", None)
    for step in range(3):
        metrics.write("step", step=step)  # training does not notice
    with pytest.raises(StoreError, match="no answer"):
        metrics.flush()
    metrics.write("step", step=3)
    store.error = None
    metrics.flush()
    assert [f'"step":{step},' in line for step, line in enumerate(lines_in(store))] == [True] * 4
    metrics.close()


class KilledError(BaseException):
    """What ends a process before its next statement."""


class Killing(FolderStore):
    """A folder whose writer is killed before its `left`th next write."""

    left = 10**9

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def put(self, key: str, data: bytes) -> None:
        self._count()
        super().put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._count()
            super().delete([key])


def fill(store: Store, generation: int, numbers: Iterable[int]) -> None:
    for number in numbers:
        line = {"kind": "note", "generation": generation, "number": number}
        data = json.dumps(line).encode() + b"\n"
        store.put(small_key(f"{generation:04d}-n", number), data)


def found(store: Store) -> list[tuple[int, int]]:
    return [(line["generation"], line["number"]) for line in History.line_reader(store).new()]


def spans(store: Store) -> list[tuple[int, int, int]]:
    objects = metrics_objects(store.sizes("metrics/"))
    return [(one.generation, one.first, one.last) for one in objects]


def test_what_dead_attempts_left_and_own_runs_are_merged(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    fill(store, 1, [1, 2, 3, 5])  # the 4th never arrived
    fill(store, 2, range(1, 5))
    fill(store, 3, range(1, 3))  # a successor that this writer does not know of
    before = found(store)
    compact(store, 2, least=5)
    small = [(2, number, number) for number in range(1, 5)] + [(3, 1, 1), (3, 2, 2)]
    assert spans(store) == [(1, 1, 3), (1, 5, 5), *small]
    assert found(store) == before
    fill(store, 2, [5])
    compact(store, 2, least=5)
    compact(store, 3)
    assert spans(store) == [(1, 1, 3), (1, 5, 5), (2, 1, 5), (3, 1, 2)]
    assert found(store) == [*before[:8], (2, 5), *before[8:]]


def test_a_kill_at_any_write_loses_and_doubles_no_line(tmp_path: Path) -> None:
    whole = [(1, number) for number in range(1, 5)] + [(2, 1)]
    for left in range(8):
        store = Killing(tmp_path / str(left))
        fill(store, 1, range(1, 5))
        fill(store, 2, [1])
        store.left = left
        try:
            compact(store, 2)
        except KilledError:
            is_killed = True
        else:
            is_killed = False
        assert found(store) == whole, left
        store.left = 10**9
        compact(store, 2)
        assert spans(store) == [(1, 1, 4), (2, 1, 1)]
        assert found(store) == whole, left
    assert not is_killed


def test_a_stale_attempt_may_write_and_merge_beside_its_successor(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    fill(store, 1, range(1, 5))
    compact(store, 2, least=256)  # the successor's
    fill(store, 1, [3, 5, 6])  # sent again, and later ones
    assert found(store) == [(1, number) for number in range(1, 7)]
    compact(store, 1, least=2)
    assert spans(store) == [(1, 1, 4), (1, 5, 6)]
    assert found(store) == [(1, number) for number in range(1, 7)]


def test_large_objects_do_not_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    fill(store, 1, range(1, 10))
    size = store.sizes("metrics/")[small_key("0001-n", 1)]
    monkeypatch.setattr("training.durable.record.metrics._MOST_BYTES", 4 * size)
    compact(store, 1, least=9)
    assert spans(store) == [(1, 1, 4), (1, 5, 8), (1, 9, 9)]


def test_a_store_that_fails_leaves_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    fill(store, 1, range(1, 4))

    def refuse(key: str, data: bytes) -> None:
        raise StoreError("no answer")

    monkeypatch.setattr(store, "put", refuse)
    compact(store, 1)
    assert "[metrics] small objects were not merged: no answer" in caplog.text
    assert found(store) == [(1, 1), (1, 2), (1, 3)]


def test_an_attempt_merges_behind_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.record.metrics._MERGED", 8)
    monkeypatch.setattr("training.durable.record.metrics._FIRST_MERGE", 2)
    store = FolderStore(tmp_path)
    fill(store, 1, range(1, 30))
    metrics = Metrics(store, 2, "n", None)
    for number in range(1, 11):
        metrics.write("note", number=number)
        metrics.flush()
    metrics._merging.shutdown(wait=True)
    # At its second object what the first attempt had left, at its tenth its own first nine or ten.
    assert spans(store)[0] == (1, 1, 29)
    assert spans(store)[1][:2] == (2, 1)
    assert spans(store)[1][2] >= 9
    assert found(store) == [(1, n) for n in range(1, 30)] + [(2, n) for n in range(1, 11)]
    metrics.close()


def test_a_full_disk_of_the_local_copy_stops_no_run(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    metrics = Metrics(store, 1, "n", Path("/dev/full"))
    for step in (1, 2):
        metrics.write("step", step=step)
    metrics.flush()
    metrics.close()
    assert len(lines_in(store)) == 2


def test_lines_go_on_to_the_local_copy_once_its_disk_has_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer looked hung to its alarms until its attempt ended."""
    local = tmp_path / "metrics.jsonl"
    metrics = Metrics(FolderStore(tmp_path / "store"), 1, "n", local)
    metrics.write("step", step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (local.stat().st_size + 9, limits[1]))
    try:
        for step in range(2, 1000):
            metrics.write("step", step=step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("lines go on to the store") == 1
    for step in (1000, 1001):
        metrics.write("step", step=step)
    assert json.loads(local.read_text().splitlines()[-1])["step"] == 1001
    metrics.close()
