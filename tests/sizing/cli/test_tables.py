"""Tables and JSON of every command: at most 100 columns in a pipe, one versioned envelope."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import pytest

from sizing.__main__ import COMMANDS, main
from sizing.cli.tables import is_key, print_json, show_table, table_heading

EVERY = [
    ["catalogue", "--family", "g5"],
    ["catalogue", "g5.xlarge"],
    ["plan", "trajectory", "--size", "g5.2xlarge"],
    ["plan", "trajectory", "--size", "g5.xlarge", "--micro-batch", "8", "--interval", "600s"],
    ["advise", "trajectory", "--sizes", "g5.xlarge,g6.xlarge", "--explain"],
    ["select", "--instead-of", "p3.2xlarge", "--gpu-percent", "10"],
    ["catalogue", "--families"],
    ["advise", "trajectory", "--sizes", "g5", "--given", "parallel_jobs=4"],
    ["select", "--phase", "train"],
    ["select", "--phase", "experiment"],
    ["select", "--phase", "serve-batch", "--model", "bert-base"],
    ["accuracy"],
]


@pytest.mark.parametrize("arguments", EVERY, ids=" ".join)
def test_a_pipe_gets_at_most_100_columns(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert max(len(line) for line in lines) <= 100


@pytest.mark.parametrize("arguments", EVERY, ids=" ".join)
def test_json_is_one_object_with_its_version_and_plain_keys(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] >= 1
    assert document["command"] == arguments[0]
    units_in_prose = r"[$%]|/h| (MiB|GiB|s|ms|h)$"
    assert [key for key in keys(document) if re.search(units_in_prose, key)] == []


def keys(value: Any) -> Iterable[str]:
    """Every key at every depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_written_for_people(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert not re.search(r"[{}]|%\(|<class|None\)", said)


def test_a_number_is_never_cut_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(
        [{"size": "g5.xlarge", "usd_per_hour": 1.006, "why": "a reason of many words " * 20}]
    )
    shown = capsys.readouterr().out
    assert "1.006" in shown
    assert "g5.xlarge" in shown
    assert "$/h" in shown
    assert "…" not in shown


def test_where_there_is_no_room_long_words_are_folded_and_nothing_is_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {f"column_{place}": f"{place}-{'x' * 30}-{place}" for place in range(6)}
    show_table([row | {"usd": 123.4, "seconds": 56789}])
    shown = capsys.readouterr().out
    assert "123.4" in shown
    assert "56,789" in shown
    assert shown.count("x") == 6 * 30


def test_a_key_becomes_a_heading_and_other_text_stays() -> None:
    assert table_heading("spot_usd_per_hour") == "Spot $/h"
    assert table_heading("busy_percent") == "busy %"
    assert table_heading("GPU MiB") == "GPU MiB"
    assert is_key("usd_p50")
    assert not is_key("Spot $")


def test_json_knows_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("plan", {"hours": math.inf, "rows": [{"ratio": math.nan}]})
    document = json.loads(capsys.readouterr().out)
    assert document == {"format": 1, "command": "plan", "hours": None, "rows": [{"ratio": None}]}
