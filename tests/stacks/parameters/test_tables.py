"""`python -m stacks.parameters`: one size with its origins, and what differs between sizes."""

import json

import pytest

from stacks.parameters.__main__ import FAMILIES, PAGE, compare, deployable_sizes, main, page

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


def test_sizes_are_compared_in_what_differs_only() -> None:
    small, large = compare(["g5.xlarge", "g5.12xlarge"], {})
    assert (small["data_volume.mib_per_second"], large["data_volume.mib_per_second"]) == (125, 1907)
    assert (small["gpus"], large["gpus"]) == ("1 x A10G", "4 x A10G")
    assert "max_hours" not in small


def test_every_size_of_the_four_families_is_compared(capsys: Output) -> None:
    sizes = deployable_sizes(FAMILIES)
    assert {size.partition(".")[0] for size in sizes} == set(FAMILIES)
    assert len([size for size in sizes if size.startswith("g5.")]) == 8
    assert main(["--compare"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(sizes) + 1


def test_fails_for_several_sizes_without_a_comparison_and_for_an_unknown_one(
    capsys: Output,
) -> None:
    assert main(["g5.xlarge", "g5.2xlarge"]) == 2
    assert "add --compare" in capsys.readouterr().err
    assert main(["g5.huge"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("parameters: size 'g5.huge' is not in the instance catalogue")


def test_the_page_lists_every_parameter_as_it_is() -> None:
    assert page() == PAGE.read_text(), "run `make parameters ARGS=--page`"
