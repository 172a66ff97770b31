"""The publisher of training metrics: what it makes of the trainer's lines, and that it gets out."""

import json
from pathlib import Path
from typing import Any

import pytest

from userdata.send_metrics import MetricsPublisher, TrainingWatch


def step(number: int) -> str:
    return json.dumps({"kind": "step", "step": number})


def commit(number: int) -> str:
    return json.dumps({"kind": "commit", "step": number})


def test_work_done_is_counted_from_one_publication_to_the_next() -> None:
    watch = TrainingWatch()
    watch.read([step(1), step(2), json.dumps({"kind": "evaluation"}), commit(2)], now=5)
    assert watch.data(65) == {
        "training_running": 1,
        "training_steps": 3,
        "seconds_since_commit": 60,
        "useful_seconds": 0.0,
    }
    watch.sent()
    watch.read([json.dumps({"kind": "prepare"})], now=70)
    assert watch.data(80)["training_steps"] == 1
    # A shard in the store is as safe as a commit.
    assert watch.data(80)["seconds_since_commit"] == 10


def test_only_what_a_commit_holds_is_useful_and_waiting_never_is() -> None:
    watch = TrainingWatch()
    line = {"kind": "step", "step": 1, "num_samples": 64, "samples_per_second": 8, "data_wait": 0.5}
    watch.read([json.dumps(line)] * 3, now=5)
    assert watch.data(60)["useful_seconds"] == 0
    watch.read([commit(3), json.dumps(line | {"step": 4, "samples_per_second": "8"})], now=70)
    assert watch.data(120)["useful_seconds"] == 12
    watch.sent()
    watch.read([json.dumps({"kind": "prepare", "seconds": 3.0})], now=130)
    assert watch.data(180)["useful_seconds"] == 3
    assert "useful_seconds" not in TrainingWatch(is_program=True).data(60)


def test_the_age_of_the_last_commit_begins_with_the_trainer() -> None:
    watch = TrainingWatch()
    assert watch.data(100)["seconds_since_commit"] == 0
    assert watch.data(160)["seconds_since_commit"] == 60


def test_steps_that_no_commit_holds_are_unsaved() -> None:
    watch = TrainingWatch()
    assert not watch.has_unsaved_steps
    watch.read([step(41)], now=0)
    assert watch.has_unsaved_steps
    watch.read([commit(41)], now=1)
    assert not watch.has_unsaved_steps


def test_steps_after_the_commit_at_a_notice_are_only_won() -> None:
    watch = TrainingWatch()
    watch.read([step(41), json.dumps({"kind": "notice", "step": 41})], now=0)
    assert watch.has_unsaved_steps
    watch.read([commit(41), step(42)], now=1)
    assert not watch.has_unsaved_steps


@pytest.mark.parametrize(
    ("later", "verdict"),
    [
        # It ended without a save, or was killed before it could say so.
        ([{"kind": "ended", "exit_code": -9, "unsaved_seconds": 3600.0}], True),
        ([{"kind": "running", "unsaved_seconds": 3600.0}], True),
        # What it did after its save at the notice is at most as old as the notice.
        ([{"kind": "running", "unsaved_seconds": 3600.0}, {"kind": "commit"}], False),
        ([{"kind": "commit"}, {"kind": "ended", "unsaved_seconds": 100.0}], False),
        # It was asked for at the notice, and holds what was written an hour ago.
        ([{"kind": "commit"}, {"kind": "ended", "unsaved_seconds": 3600.0}], True),
    ],
)
def test_a_program_without_steps_is_judged_by_the_age_of_its_snapshot(
    later: list[dict[str, Any]], verdict: bool
) -> None:
    watch = TrainingWatch(is_program=True)
    lines = [{"kind": "running", "unsaved_seconds": 3500.0}, {"kind": "notice"}, *later]
    watch.read([json.dumps(line | {"step": 0, "snapshot": 0}) for line in lines], now=0)
    assert watch.has_unsaved_steps == verdict


def test_a_program_without_steps_is_not_said_to_stand_still() -> None:
    watch = TrainingWatch(is_program=True)
    watch.read([commit(0)], now=5)
    assert watch.data(60) == {"training_running": 1, "seconds_since_commit": 55}
    # One line shows no pace yet.
    watch.read([json.dumps({"kind": "metrics", "step": 1, "values": {"loss": 1}})], now=100)
    assert "training_steps" not in watch.data(120)


def test_a_program_stands_still_after_three_of_its_longest_pauses() -> None:
    watch = TrainingWatch(is_program=True)
    watch.read([step(1)], now=0)
    watch.read([step(2)], now=2400)
    watch.sent()
    assert watch.data(2400 + 7199)["training_steps"] == 1
    assert watch.data(2400 + 7200)["training_steps"] == 0
    # A fast one may evaluate in silence.
    watch = TrainingWatch(is_program=True)
    watch.read([step(1)], now=0)
    watch.read([step(2)], now=1)
    watch.sent()
    assert watch.data(1800)["training_steps"] == 1
    assert watch.data(1801)["training_steps"] == 0


def test_lines_that_are_no_records_are_passed_over() -> None:
    watch = TrainingWatch()
    watch.read(["{", "", "3", "[]", step(3)], now=0)
    assert watch.progress == 1


class Scene:
    """A publisher over a folder, with a trainer and a clock that the test moves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0
        self.runs = True
        self.reachable = True
        self.sent: list[dict[str, float]] = []
        for name in ("var/log/training", "run/training"):
            (root / name).mkdir(parents=True)
        self.publisher = MetricsPublisher(
            put=self._put,
            is_running=lambda: self.runs,
            notice_budget_seconds=120,
            clock=lambda: self.now,
        )

    def _put(self, values: dict[str, float]) -> bool:
        if self.reachable:
            self.sent.append(values)
        return self.reachable

    def write(self, text: str) -> None:
        with (self.root / "var/log/training/metrics.jsonl").open("a") as file:
            file.write(text)

    def notice(self) -> None:
        (self.root / "run/training/notice.json").write_text("{}")

    def step(self, now: float) -> None:
        self.now = now
        self.publisher.step()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("MACHINE_ROOT", str(tmp_path))
    return Scene(tmp_path)


def test_it_publishes_every_minute_while_training_runs(scene: Scene) -> None:
    scene.step(0)
    scene.write(step(1) + "\n" + step(2))
    scene.step(30)
    scene.write("\n")
    scene.step(60)
    assert [values["training_steps"] for values in scene.sent] == [0, 2]
    scene.runs = False
    scene.step(120)
    assert len(scene.sent) == 2


def test_a_trainer_that_only_waits_for_its_dataset_is_still_booting(scene: Scene) -> None:
    arriving = scene.root / "run/training/dataset-begun"
    arriving.touch()
    scene.step(0)
    assert scene.sent == []
    scene.write(step(1) + "\n")
    scene.step(60)
    assert [values["training_steps"] for values in scene.sent] == [1]
    # Once it has begun, waiting is what the alarm is for.
    scene.step(120)
    assert [values["training_steps"] for values in scene.sent] == [1, 0]


def test_what_could_not_be_sent_is_counted_in_the_next_minute(scene: Scene) -> None:
    scene.write(step(1) + "\n")
    scene.reachable = False
    scene.step(0)
    scene.reachable = True
    scene.write(step(2) + "\n")
    scene.step(60)
    assert [values["training_steps"] for values in scene.sent] == [2]


def test_history_is_no_news(scene: Scene) -> None:
    scene.write(step(1) + "\n" + commit(1) + "\n")
    scene.publisher.skip_history()
    scene.step(0)
    assert scene.sent[0]["training_steps"] == 0
    assert not scene.publisher.watch.has_unsaved_steps


@pytest.mark.parametrize(("saved", "verdict"), [(True, 0.0), (False, 1.0)])
def test_a_notice_is_judged_when_the_trainer_is_gone(
    scene: Scene, saved: bool, verdict: float
) -> None:
    scene.write(step(7) + "\n")
    scene.step(0)
    scene.notice()
    scene.step(10)
    assert len(scene.sent) == 1, "the trainer still has time"
    if saved:
        scene.write(commit(7) + "\n")
    scene.runs = False
    scene.step(14)
    scene.step(16)
    assert scene.sent[1:] == [{"notice_without_commit": verdict}]


def test_a_notice_is_judged_before_the_machine_ends_at_the_latest(scene: Scene) -> None:
    scene.write(step(7) + "\n")
    scene.step(0)
    scene.notice()
    scene.step(1)
    scene.step(90)
    assert len([values for values in scene.sent if "notice_without_commit" in values]) == 0
    scene.step(92)
    assert scene.sent[-1] == {"notice_without_commit": 1.0}
