"""Policies on the same traces: ours behind nobody but the oracle, and what a short trace lacks."""

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.spot.comparison import Question, compare, daly_interval
from sizing.spot.traces import load_trace


def make_trace(path: Path, *, seed: int, hours: int = 120) -> Path:
    """A trace of one machine that comes and goes, 3 h and 1 h on average, five-minute ticks."""
    luck, ticks, up = random.Random(seed), [], True
    for _ in range(hours * 12):
        up = luck.random() > (1 / 36 if up else 11 / 12)
        ticks.append(int(up))
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": ticks}))
    return path


def test_ours_is_behind_nobody_but_the_oracle(tmp_path: Path) -> None:
    question = Question(work_hours=24, deadline_hours=36, num_starts=10)
    for seed in range(2):
        trace = load_trace(make_trace(tmp_path / f"{seed}.json", seed=seed))
        rows = {row.policy: row for row in compare([trace], question)}
        oracle, ours = rows.pop("oracle"), rows.pop("ours")
        goodputs = [row.goodput for row in rows.values() if row.goodput is not None]
        assert {"every 30 min", "every 60 min", "Young/Daly, no notice"} <= set(rows)
        assert oracle.goodput is not None and ours.goodput is not None
        assert oracle.goodput >= ours.goodput >= max(goodputs)
        in_time = {name: row for name, row in rows.items() if row.in_time == 1.0}
        assert "Uniform Progress, saving as ours" in in_time
        # Ten jobs are few: half a point is luck.
        costs = [row.cost for row in in_time.values() if row.cost is not None]
        assert oracle.cost is not None and ours.cost is not None
        assert oracle.cost <= ours.cost <= min(costs) + 0.005
        assert ours.in_time == 1.0


def test_a_trace_shorter_than_the_deadline_has_goodput_and_no_cost(tmp_path: Path) -> None:
    short = load_trace(make_trace(tmp_path / "short.json", seed=3, hours=30))
    rows = compare([short], Question())
    assert rows[-1].policy == "oracle" and rows[-1].goodput
    assert all(row.cost is None for row in rows)


def test_fails_without_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spot", "--traces", str(tmp_path), "--starts", "0"]) == 2
    assert "--starts must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mean_hours", "checkpoint", "minutes"),
    # Young's figures, for checkpoints that are short against the mean life.
    [(24, 10, 21.9), (168, 60, 142), (3.4, 1, 2.6), (2.1, 15, 7.9)],
)
def test_daly_is_near_young_for_short_saves(
    mean_hours: float, checkpoint: float, minutes: float
) -> None:
    seconds = daly_interval(checkpoint_seconds=checkpoint, rate_per_hour=1 / mean_hours)
    assert seconds / 60 == pytest.approx(minutes, rel=0.04)


@pytest.mark.parametrize("checkpoint", [0.01, 5.0, 600.0, 7200.0, 40_000.0])
def test_daly_is_the_exact_optimum(checkpoint: float) -> None:
    def wall_per_second_of_work(interval: float) -> float:
        return math.expm1((interval + checkpoint) / 3600) / interval

    best = daly_interval(checkpoint_seconds=checkpoint, rate_per_hour=1.0)
    assert best < 3600
    assert all(
        wall_per_second_of_work(best) <= wall_per_second_of_work(best * scale)
        for scale in (0.8, 0.99, 1.01, 1.25)
    )


def test_free_saves_are_taken_all_the_time_and_calm_runs_never_save() -> None:
    assert daly_interval(checkpoint_seconds=0, rate_per_hour=1) == 0
    assert daly_interval(checkpoint_seconds=10, rate_per_hour=0) == math.inf
