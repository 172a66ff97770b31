"""`python -m benchmarks spot --trace`: one table, JSON, a chart, and refusals in one sentence."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def make_trace(path: Path, *, seed: int, hours: int = 120) -> Path:
    """A trace of one machine that comes and goes, 3 h and 1 h on average, five-minute ticks."""
    luck, ticks, up = random.Random(seed), [], True
    for _ in range(hours * 12):
        up = luck.random() > (1 / 36 if up else 11 / 12)
        ticks.append(int(up))
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": ticks}))
    return path


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    return [str(make_trace(tmp_path / f"{name}.json", seed=seed)) for seed, name in enumerate("ab")]


def test_ours_is_behind_nobody_but_the_oracle(
    traces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--trace", *traces, "--work-hours", "24", "--starts", "10", "--json"]
    assert main(["spot", *asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["traces"]) == 2
    for trace in ("a", "b"):
        rows = {row["policy"]: row for row in answer["rows"] if row["trace"] == trace}
        oracle, ours = rows.pop("oracle"), rows.pop("ours")
        others = [row for row in rows.values() if row["goodput"] is not None]
        assert {"every 30 min", "every 60 min", "Young/Daly, no notice"} <= set(rows)
        assert oracle["goodput"] >= ours["goodput"] >= max(row["goodput"] for row in others)
        in_time = [row for row in rows.values() if row["in_time"] == 1.0]
        assert "Uniform Progress, saving as ours" in {row["policy"] for row in in_time}
        # Ten jobs are few: half a point is luck.
        assert oracle["cost"] <= ours["cost"] <= min(row["cost"] for row in in_time) + 0.005
        assert ours["in_time"] == 1.0
        assert sum(ours["seconds"].values()) == pytest.approx(120 * 3600, abs=1)


def test_traces_joined_to_a_fleet_are_one_column(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "chart.svg"
    asked = ["--fleet", "--trace", *traces, "--work-hours", "24", "--starts", "2"]
    assert main(["spot", *asked, "--chart", str(chart)]) == 0
    shown = capsys.readouterr().out
    assert "fleet of 2 pools" in shown
    assert "points from oracle" in shown
    assert "(assumed)" in shown
    first = chart.read_text()
    assert "<svg" in first
    assert main(["spot", *asked, "--chart", str(chart)]) == 0
    assert chart.read_text() == first


def test_a_trace_shorter_than_the_deadline_has_goodput_and_no_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = make_trace(tmp_path / "short.json", seed=3, hours=30)
    assert main(["spot", "--trace", str(short)]) == 0
    shown = capsys.readouterr().out
    assert "goodput on Spot" in shown
    assert "A trace shorter than the deadline has no costs." in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--deadline-hours", "40"], "48 h of work cannot be done in 40 h: on demand alone takes"),
        (["--work-hours", "0"], "work_hours must be more than 0"),
        (["--work-hours", "nan"], "work_hours must be a finite number"),
        (["--notice-arrives", "2"], "notice_arrives is a share up to 1, got 2"),
        (["--size", "g5.3xlarge"], "size 'g5.3xlarge' is not in the instance catalogue"),
        (["--chart", "chart.pdf"], "--chart takes a file ending in .svg or .png, got chart.pdf"),
        (["--starts", "0"], "num_starts must be more than 0"),
    ],
)
def test_fails_in_one_sentence(
    options: list[str], says: str, traces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["spot", "--trace", traces[0], *options]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_fails_without_a_machine_or_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text('{"metadata": {"gap_seconds": 60}, "data": [0, 0]}')
    assert main(["spot", "--trace", str(empty)]) == 2
    assert "trace empty has no machine at any time" in capsys.readouterr().err
    assert main(["spot", "--trace", str(tmp_path / "no.json")]) == 2
    assert "no.json does not exist" in capsys.readouterr().err
