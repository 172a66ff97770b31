"""`python -m stacks.parameters`: a size's values with their origins."""

import json

import pytest

from stacks.parameters.__main__ import PAGE, main, page

Output = pytest.CaptureFixture[str]


def test_the_table_says_where_each_value_comes_from(capsys: Output) -> None:
    assert main(["g5.2xlarge", "-c", "max_hours=5"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["data_volume.mib_per_second"][1:4] == ["125", "by-size:", "what"]
    assert lines["run_id"][1:3] == ["run-1", "by-name:"]
    assert lines["recipe"][1:] == ["full", "cdk.json"]
    assert lines["max_hours"][1:] == ["5", "requested"]
    assert lines["max_usd"][1:4] == ["7", "by-plan:", "max_hours"]
    source = "sizing/catalogue/instances.csv:"
    assert lines["alternates"][1:4] == ["g5.4xlarge", source, "same"]


def test_the_table_can_be_read_by_programs(capsys: Output) -> None:
    assert main(["g5.4xlarge", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["data_volume.mib_per_second"]["value"] == 566
    assert rows["alternates"]["value"] == ["g5.8xlarge"]


def test_fails_for_an_unknown_size(capsys: Output) -> None:
    assert main(["g5.huge"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("parameters: size 'g5.huge' is not in the instance catalogue")


def test_the_page_lists_every_parameter_as_it_is() -> None:
    assert page() == PAGE.read_text(), "run `make parameters ARGS=--page`"
