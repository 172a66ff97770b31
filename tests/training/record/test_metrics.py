"""Lines reach the store in order, and writing them waits for nobody."""

import threading
from pathlib import Path

import pytest

from training.record.metrics import Metrics
from training.store.folder import FolderStore
from training.store.protocol import StoreError


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
    monkeypatch.setattr("training.record.metrics._FLUSH_SECONDS", 0.0)
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
    monkeypatch.setattr("training.record.metrics._FLUSH_SECONDS", 0.0)
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
