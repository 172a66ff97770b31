"""What buyers ask, each answered by one command.

Prices are read off AWS's and SkyPilot's tables by hand, and the arithmetic stands in the rows.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sizing.__main__ import main

Answer = Callable[[dict[str, Any]], object]


def first(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["candidates"][0]
    return found


def size(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["sizes"][0]
    return found


def verdict_of(answer: dict[str, Any], signal: str) -> str:
    rows = [row for row in answer["triggers"] if row["trigger"].startswith(signal)]
    return str(rows[0]["verdict"])


FOUR = "advise imagenet --sizes g5.12xlarge"
ONE = "advise imagenet --sizes g5.xlarge"
SMALL = "advise trajectory --sizes g5.xlarge,g5.2xlarge"
PLAN = "plan trajectory --size g5.2xlarge"
# The question, its command, what is looked at, the answer, the exit code.
QUESTIONS: list[tuple[str, str, Answer, object, int]] = [
    (
        "What is an hour of g5.4xlarge in us-east-1?",
        "catalogue g5.4xlarge",
        lambda a: size(a)["on_demand_usd_per_hour"],
        1.624,
        0,
    ),
    (
        "And in Ireland?",
        "catalogue g5.4xlarge --region eu-west-1",
        lambda a: size(a)["on_demand_usd_per_hour"],
        1.81287,
        0,
    ),
    (
        "And on Spot there, in the dearest zone?",
        "catalogue g5.4xlarge --region eu-west-1",
        lambda a: size(a)["spot_usd_per_hour"],
        0.9139,
        0,
    ),
    (
        "And in one zone?",
        "catalogue g5.4xlarge --region eu-west-1 --zone euw1-az1",
        lambda a: size(a)["spot_usd_per_hour"],
        0.8461,
        0,
    ),
    (
        "What does a run cost on demand? Hours x $1.212.",
        PLAN,
        lambda a: a["usd_on_demand"] / a["hours_on_demand"],
        1.212,
        0,
    ),
    (
        "And in Ireland? As many hours x $1.353.",
        f"{PLAN} --region eu-west-1",
        lambda a: a["usd_on_demand"] / a["hours_on_demand"],
        1.35276,
        0,
    ),
    (
        "What if nothing interrupts it?",
        f"{PLAN} --rate 0",
        lambda a: (a["interruptions"], a["hours_p50"] >= a["hours_on_demand"]),
        (0, True),
        0,
    ),
    (
        "And if Spot costs what on demand does?",
        f"{PLAN} --usd-per-hour 1.212",
        lambda a: a["spot_suits"],
        "no",
        0,
    ),
    (
        "Is two seconds of notice enough to save?",
        f"{PLAN} --notice 2",
        lambda a: a["notice_fits"],
        False,
        0,
    ),
    (
        "Do four runs of 7.4 GiB each fit a host of 32? 2 x 4 x 7.4 = 59.2.",
        f"{PLAN} --runs 4 --unshared-gib 7.4",
        lambda a: list(a["problems"]),
        ["host"],
        1,
    ),
    (
        "Do 190 GiB of data fit a volume of 200? 190 x 1.1 = 209.",
        f"{PLAN} --dataset-gib 190",
        lambda a: list(a["problems"]),
        ["volume"],
        1,
    ),
    (
        "And 170? 187.",
        f"{PLAN} --dataset-gib 170",
        lambda a: list(a["problems"]),
        [],
        0,
    ),
    (
        "How many steps are ten epochs of ImageNet? 10 x ceil(1,281,167 / 1,024).",
        "plan imagenet --size g5.2xlarge --epochs 10",
        lambda a: a["stages"][-1]["steps"],
        12_520,
        0,
    ),
    (
        "Five hours a week on g5.2xlarge? 5 x $1.212.",
        f"{SMALL} --hours-per-week 5",
        lambda a: a["budget"][0]["usd_week"],
        6.06,
        0,
    ),
    (
        "And a year? 52 x 5 x $1.212.",
        f"{SMALL} --hours-per-week 5",
        lambda a: a["budget"][0]["usd_year"],
        315,
        0,
    ),
    (
        "How can four runs be done?",
        f"{SMALL} --runs 4",
        lambda a: [way["way"] for way in a["ways"]],
        ["one after the other", "side by side", "a GPU each"],
        0,
    ),
    (
        "Does a faster GPU help a run that waits for its launches?",
        f"{SMALL} --given hours_per_experiment=5",
        lambda a: "nor does a faster GPU" in verdict_of(a, "hours_per_experiment"),
        True,
        0,
    ),
    (
        "Can one A10G train ImageNet in 24 h? No: 52 h, if nothing interrupts.",
        f"{ONE} --deadline-hours 24",
        lambda a: a["keeps_limits"],
        False,
        1,
    ),
    (
        "Can four? On Spot, in most runs; which is said.",
        f"{FOUR} --market spot --gpus 4 --deadline-hours 24",
        lambda a: (a["keeps_limits"], 0.7 < first(a)["chance"] < 0.9),
        (False, True),
        1,
    ),
    (
        "And on demand? In all.",
        f"{FOUR} --market on-demand --deadline-hours 24",
        lambda a: (a["keeps_limits"], first(a)["gpus"], first(a)["chance"]),
        (True, 4, 1),
        0,
    ),
    (
        "For how much? Hours x $5.672.",
        f"{FOUR} --market on-demand --gpus 4",
        lambda a: first(a)["usd_p50"] / first(a)["hours_p50"],
        5.672,
        0,
    ),
    (
        "Which keeps 24 h and $90 in nine runs of ten, for the least?",
        "advise imagenet --deadline-hours 24 --max-usd 90 --market on-demand",
        lambda a: (first(a)["usd_p90"] <= 90, first(a)["hours_p90"] <= 24, a["keeps_limits"]),
        (True, True, True),
        0,
    ),
    (
        "And the fastest?",
        "advise imagenet --max-usd 90 --market on-demand --objective hours",
        lambda a: (first(a)["gpus"], first(a)["hours_p50"] < 4),
        (8, True),
        0,
    ),
    (
        "What would have to change for $5?",
        f"{FOUR} --max-usd 5",
        lambda a: "max_usd=" in " ".join(a["verdict"]),
        True,
        1,
    ),
    (
        "And for an hour?",
        f"{FOUR} --deadline-hours 1 --market on-demand",
        lambda a: "deadline_hours=" in " ".join(a["verdict"]),
        True,
        1,
    ),
    (
        "What is the next best, and by how much?",
        "advise imagenet --sizes g5.2xlarge,g5.4xlarge",
        lambda a: "next best: g5.4xlarge on Spot, $+" in a["verdict"][1],
        True,
        0,
    ),
    (
        "What is cheapest of what costs at most $1.10 an hour on demand? g5.xlarge is $1.006.",
        "advise trajectory --sizes g5 --market on-demand --max-usd-per-hour 1.1",
        lambda a: {row["size"] for row in a["candidates"]},
        {"g5.xlarge"},
        0,
    ),
    (
        "How busy is the GPU of a run that waits for its loader? 630 of 893 a second: 71 %.",
        "plan imagenet --size g5.xlarge",
        lambda a: (round(a["gpu_busy_percent"][1]), a["bound_by"]),
        (71, "loader CPU"),
        0,
    ),
    (
        "In which region are four A10G cheapest on demand? $5.672 in three.",
        f"{FOUR} --gpus 4 --market on-demand --region any",
        lambda a: {row["region"] for row in a["candidates"] if row["usd_p50"] < 55.5},
        {"us-east-1", "us-east-2", "us-west-2"},
        0,
    ),
    (
        "A run with a deadline on Spot: does it end in time?",
        f"{SMALL} --market fallback --deadline-hours 3",
        lambda a: (first(a)["market"], first(a)["chance"]),
        ("fallback", 1),
        0,
    ),
    (
        "A tenth of an A10G is busy: what is cheaper? g6.xlarge: 1 - 0.8048 / 1.006 = 20 %.",
        "select --instead-of g5.xlarge --gpu-percent 10",
        lambda a: (a["moves"][0]["size"], a["moves"][0]["saving_percent"]),
        ("g6.xlarge", pytest.approx(20)),
        0,
    ),
    (
        "A million BERT answers at 1,000 a minute? $0.34 / 60,000 x 1,000,000.",
        "select --phase serve-online --model bert-base --requests-per-minute 1000 --latency-ms 200",
        lambda a: a["candidates"][0]["usd"],
        0.34 / 60_000 * 1e6,
        0,
    ),
]


@pytest.mark.parametrize(
    ("command", "look", "answer", "code"),
    [each[1:] for each in QUESTIONS],
    ids=[each[0] for each in QUESTIONS],
)
def test_a_buyers_question_has_its_answer(
    command: str, look: Answer, answer: object, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--json"]) == code
    found = look(json.loads(capsys.readouterr().out))
    exact = not isinstance(answer, float)
    assert found == (answer if exact else pytest.approx(answer, rel=1e-3)), command


NEEDS = re.findall(
    r"^\| [^|]+ \| `python -m sizing ([^`]+)` \| (\S+) \|$",
    (Path(__file__).parents[3] / "docs" / "sizing.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_the_page_has_a_choice_for_each_need() -> None:
    assert len(NEEDS) >= 8


@pytest.mark.parametrize(("command", "choice"), NEEDS, ids=[command for command, _ in NEEDS])
def test_a_need_has_its_choice(
    command: str, choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer.get("moves") or answer["candidates"])[0]["size"] == choice
