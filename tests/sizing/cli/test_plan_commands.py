"""plan, advise, compare, review, accuracy as people type them, on the footprints that ship."""

import json
from pathlib import Path

import pytest

from sizing.__main__ import main

SHOWN = [
    ["plan", "trajectory", "--size", "g5.2xlarge"],
    ["plan", "trajectory", "--size", "g5.xlarge", "--micro-batch", "8", "--interval", "600s"],
    ["compare", "trajectory", "--sizes", "g5.xlarge,g6"],
    ["compare", "--tables", "000"],
    ["compare", "--tables", "002"],
    ["compare", "--seed", "001"],
    ["compare", "--seed", "003"],
    ["compare", "--seed", "004"],
    ["rightsize", "p3.2xlarge", "--gpu-percent", "10"],
    ["families"],
    ["advise", "trajectory", "--given", "parallel_jobs=4"],
    ["accuracy"],
]


@pytest.mark.parametrize("arguments", SHOWN, ids=" ".join)
def test_a_table_is_shown_and_json_can_be_read(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_plan_that_cannot_work_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "trajectory", "--size", "g5.2xlarge", "--runs", "4"]
    assert main([*arguments, "--unshared-gib", "7.4"]) == 1
    assert "refused (host): 4 runs need" in capsys.readouterr().out
    assert main(arguments) == 0


def test_advice_has_the_spot_verdict_the_budget_and_the_ways(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["advise", "trajectory", "--runs", "4", "--hours-per-week", "5", "--sizes", "g5"]
    assert main([*asked, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["spot_suits"] in ("yes", "with care", "no")
    assert advice["usd_of_interruption"] > 0
    assert [way["way"] for way in advice["ways"]] == [
        "one after the other",
        "side by side",
        "a GPU each",
    ]
    now = advice["budget"][0]
    assert (now["size"], now["usd_week"], now["usd_year"]) == ("g5.2xlarge", 6.06, 315)
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "dollars at 5 hours a week" in shown
    assert "Spot suits this on g5.2xlarge" in shown


def test_given_samples_change_the_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    def dollars(*given: str) -> dict[str, float]:
        assert main(["advise", "trajectory", "--sizes", "g5", "--json", *given]) == 0
        advice = json.loads(capsys.readouterr().out)
        return {each["size"]: each["usd_on_demand"] for each in advice["candidates"]}

    usual, many = dollars(), dollars("--given", "dataset_samples=200000")
    assert all(many[size] > 2 * usual[size] for size in usual)


def test_a_plan_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "trajectory", "--size", "g5.2xlarge"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 33
    assert main(["plan", "trajectory", "--size", "g5.2xlarge", "--explain"]) == 0
    assert "from memory" in capsys.readouterr().out.removeprefix(short)


def test_every_trainable_size_is_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "trajectory", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    sizes = [each["size"] for each in advice["candidates"]]
    assert len(sizes) == len(set(sizes)) > 30
    dollars = [
        each["usd_spot_p50"] for each in advice["candidates"] if each["usd_spot_p50"] is not None
    ]
    assert dollars == sorted(dollars)
    assert advice["take"] == sizes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "trajectry", "--size", "g5.xlarge"], "did you mean trajectory?"),
        (["plan", "trajectory", "--size", "g5.xlrge"], "the nearest"),
        (["plan", "trajectory", "--size", "g5.xlarge", "--runs", "0"], "runs is 0"),
        (["plan", "trajectory", "--size", "g5.xlarge", "--gpus", "9"], "g5.xlarge has 1"),
        (["compare"], "give either a workload or --tables"),
        (["compare", "trajectory", "--seed", "000"], "give either a workload or --tables"),
        (["compare", "trajectory", "--sizes", ","], "names no size"),
        (["advise", "trajectory", "--given", "parallel_jobs=many"], "write SIGNAL=NUMBER"),
        (["advise", "trajectory", "--given", "parallel_jobs=-1"], "a number from 0"),
        (["advise", "trajectory", "--given", "parallel_jobs=2.5"], "a whole number from 1"),
        (["advise", "trajectory", "--hours-per-week", "200"], "at most 168"),
        (
            ["plan", "trajectory", "--size", "g5.xlarge", "--batch", "24"],
            "not a multiple of the micro-batch",
        ),
        (["plan", "trajectory", "--size", "g5.xlarge", "--epochs", "0"], "epochs is 0"),
        (["rightsize", "g5.xlarge"], "give --gpu-percent"),
        (["rightsize", "inf1.xlarge", "--gpu-percent", "5"], "no NVIDIA GPU"),
        (["rightsize", "c5.xlarge", "--cpu-percent", "120"], "from 0 to 100"),
        (["review", "nowhere"], "there is no nowhere"),
    ],
)
def test_fails_in_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_review_shows_a_run_and_asks_for_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = {"run_id": "r", "workload": "trajectory", "recipe": "full", "seconds": 3600}
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    assert main(["review", str(tmp_path)]) == 2
    assert "give --size" in capsys.readouterr().err
    assert main(["review", str(tmp_path), "--size", "g5.xlarge", "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["hours from the first attempt"]["actual"] == 1


def test_a_plan_on_a_trace_takes_its_interruptions_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    # One machine of an hour in every eight: whoever asks at any moment waits for hours.
    ticks = [1] * 12 + [0] * 84
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": ticks * 3}))
    asked = ["plan", "trajectory", "--size", "g5.2xlarge", "--trace", str(trace)]
    assert main([*asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 2 < plan["hours_p50"] < 6 < plan["hours_p90"] < 8
    assert main([*asked, "--rate", "0.1"]) == 2
    assert "a rate and a trace contradict each other" in capsys.readouterr().err
