"""A run's history: damage is passed over and said, and a long one fits the memory."""

import random
import threading
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.training.hooks import interrupt_at
from tests.training.runs import Run
from training.cli.main import main
from training.durable.record.history import History
from training.durable.record.metrics import Events, Metrics, compact
from training.durable.record.run import RunConfig
from training.durable.report.page import write_report
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Stored, get_each
from training.engine.step_log import _sample_digest

NUM_SAMPLES = 1_281_167
NUM_STEPS = 4_000


def torn(data: bytes) -> bytes:
    return data[:-20]


def wrong(data: bytes) -> bytes:
    return b"\xff\x00" * 40


@pytest.mark.parametrize("damage", [torn, wrong])
def test_a_run_with_damaged_metrics_and_events_finishes_and_says_so(
    run: Run, whole: Run, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at("first", 7)
    assert run.attempt() == 75
    for folder in ("metrics", "events"):
        path = sorted((Path(run.uri) / folder).iterdir())[1]
        path.write_bytes(damage(path.read_bytes()))
    capsys.readouterr()
    assert run.attempt() == 0
    assert run.head.weights_sha256 == whole.head.weights_sha256
    metrics, event = run.json("receipt.json")["passed_over"]
    assert metrics.startswith("metrics/0001-")
    assert metrics.endswith("1 damaged line")
    assert event.startswith("events/")
    said = capsys.readouterr().out
    assert f"[history] passed over {metrics}" in said
    assert "Passed over (2): metrics/0001-" in run.page
    assert main(["report", f"--run-uri={run.uri}"]) == 0
    assert "Passed over (2)" in capsys.readouterr().out


def test_what_an_undamaged_run_says_of_its_damage(whole: Run) -> None:
    assert History.read(whole.store).passed_over == []
    assert "passed_over" not in whole.json("receipt.json")


def test_a_run_without_anything_or_without_events_has_a_history(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    history = History.read(store)
    assert (len(history.steps), history.steps.by_stage(), history.attempts) == (0, {}, [])
    metrics = Metrics(store, 1, "n", None)
    metrics.write("step", stage="a", step=1)
    metrics.flush()
    metrics.close()
    history = History.read(store)
    assert (len(history.steps), history.attempts) == (1, [])


def test_steps_that_an_attempt_repeats_itself_count_once(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    Events(store, "w").emit("take-over", generation=1)
    metrics = Metrics(store, 1, "n", None)
    for number, loss in ((1, 1.0), (2, 2.0), (3, float("nan")), (2, 20.0), (3, 30.0)):
        fields = {"samples_per_second": 4.0, "num_samples": 2}
        metrics.write("step", stage="a", step=number, loss=loss, **fields)
    metrics.write("step", stage="a", step=10**30, loss=1.0)
    metrics.flush()
    metrics.close()
    history = History.read(store)
    assert history.steps["loss"].tolist() == [1.0, 20.0, 30.0]
    (attempt,) = history.attempts
    assert (attempt.first_step, attempt.last_step, attempt.num_repeated) == (1, 3, 2)
    assert attempt.repeated_seconds == 1.0
    assert history.passed_over == [f"the damaged line of step {10**30}"]


def test_a_long_history_is_small_in_the_store_and_in_memory(tmp_path: Path, whole: Run) -> None:
    """Per step what 90 epochs of ImageNet need: 100 MB and 1 GB for 450,450 steps."""
    store, rng = FolderStore(tmp_path), random.Random(1)
    Events(store, "w").emit("take-over", generation=1)
    metrics = Metrics(store, 1, "n", None)
    for number in range(1, NUM_STEPS + 1):
        metrics.write(
            "step",
            stage="resnet",
            step=number,
            stage_step=number,
            epoch=number // 5005,
            loss=2 + rng.random(),
            lr=rng.random() / 10,
            samples_per_second=round(780 + rng.random(), 2),
            data_wait=round(rng.random() / 50, 4),
            **_sample_digest(range(number, number + 256), NUM_SAMPLES),
            metrics={"accuracy": rng.random()},
        )
        if number % 100 == 0:
            metrics.flush()
    metrics.close()
    compact(store, 1)
    sizes = store.sizes("metrics/")
    assert len(sizes) == 1
    assert sum(sizes.values()) < 70 * NUM_STEPS
    config = RunConfig.read(whole.store)
    assert config is not None
    tracemalloc.start()
    try:
        history, *_ = write_report(store, config, whole.head)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(history.steps) == NUM_STEPS
    assert peak < 8e6  # as dicts with ids the lines were 48 MB


def test_of_what_a_program_reports_for_weeks_as_much_is_kept_as_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 2 KB a step: 8 million took 16 GB, and finished scripts ended before they were done."""
    monkeypatch.setattr("training.durable.record.history._MOST_METRICS", 40)
    store = FolderStore(tmp_path)
    for generation in (1, 2):
        Events(store, f"i-{generation}").emit("take-over", generation=generation)
        metrics = Metrics(store, generation, "n", None)
        for step in range(1, 502):
            metrics.write("metrics", stage="p", step=step, at=step, values={"loss": 1 / step})
            if step % 100 == 0:
                metrics.write("metrics", stage="p", step=step, at=step, values={"rare": step})
            metrics.write("running", step=step, unsaved_seconds=float(step), snapshot=0)
        if generation == 2:
            metrics.write("ended", step=step, unsaved_seconds=0.25, snapshot=1)
        metrics.flush()
        metrics.close()
    found = History.read(store)
    kinds = [line["kind"] for line in found.lines]
    assert (kinds.count("running"), kinds[-1]) == (2, "ended")
    assert found.unsaved() == {1: 501.0, 2: 0.25}
    of_loss = [x for x in found.lines if "loss" in x.get("values", ()) and x["generation"] == 1]
    steps = [0] + [line["step"] for line in of_loss]
    assert 20 < len(steps) < 42 and steps[-1] == 501
    assert max(b - a for a, b in pairwise(steps)) < 2 * 501 / 20, "evenly spread"
    rare = [line["step"] for line in found.lines if "rare" in line.get("values", ())]
    assert rare == [100, 200, 300, 400, 500] * 2


def test_objects_are_read_several_at_once_and_in_order(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    class Meeting(FolderStore):
        def get(self, key: str) -> Stored | None:
            if key in keys[:4]:
                together.wait(120)  # until four are reading
            return super().get(key)

    store = Meeting(tmp_path)
    keys = [f"events/{number}" for number in range(40)]
    for key in keys[1:]:
        store.put(key, key.encode())
    found = [one.data.decode() if one else None for one in get_each(store, keys)]
    assert found == [None, *keys[1:]]
