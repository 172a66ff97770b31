"""`measure`: the committed footprints are what the stages need, and the page names every key."""

import json
from pathlib import Path

import pytest
import torch

from tests.training.forked import command, in_fork
from tests.training.runs import WORKLOAD
from training.cli.measure import DEFAULT_OUT, difference, measured
from training.workloads import WORKLOADS

ROOT = Path(__file__).parents[3]
FILE = ROOT / DEFAULT_OUT


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_the_committed_footprints_are_what_the_stages_need(name: str) -> None:
    """The laptop recipes at their own micro-batch here, everything with the marker slow."""
    rows = in_fork(lambda: list(measured(name, "laptop", {}, factors=(1,))))
    assert difference(FILE, rows) is None


@pytest.mark.slow
def test_all_committed_footprints_are_what_the_stages_need() -> None:
    assert command(["measure", "--check", f"--out={FILE}"]).code == 0


def test_every_recipe_is_measured_and_every_key_is_explained() -> None:
    from training.workloads import load_workload

    footprints = json.loads(FILE.read_text())["footprints"]
    recipes = {(name, recipe) for name in WORKLOADS for recipe in load_workload(name).recipes}
    assert {(row["workload"], row["recipe"]) for row in footprints} == recipes
    page = (ROOT / "docs" / "sizing.md").read_text()
    keys = {key for row in footprints for key in row}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_a_workload_of_one_s_own_is_measured_into_a_file(tmp_path: Path) -> None:
    out = tmp_path / "footprints.json"
    arguments = ["measure", f"--workload={WORKLOAD}", "--recipe=quick", f"--out={out}"]
    assert command(arguments).code == 0
    rows = json.loads(out.read_text())["footprints"]
    assert {row["stage"] for row in rows} == {"first", "second"}
    assert command([*arguments, "--check"]).code == 0


def test_the_other_recipes_of_the_file_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "footprints.json"
    # Rows of two torch versions are refused in one file.
    out.write_text(
        json.dumps({**json.loads(FILE.read_text()), "torch": torch.__version__.partition("+")[0]})
    )
    assert (
        command(["measure", f"--workload={WORKLOAD}", "--recipe=quick", f"--out={out}"]).code == 0
    )
    before = json.loads(FILE.read_text())["footprints"]
    after = json.loads(out.read_text())["footprints"]
    assert [row for row in after if row in before] == before
    assert len(after) > len(before)


def test_fails_when_the_file_says_something_else(tmp_path: Path) -> None:
    out = tmp_path / "footprints.json"
    arguments = ["measure", f"--workload={WORKLOAD}", "--recipe=quick", f"--out={out}"]
    missing = command([*arguments, "--check"])
    assert missing.code == 1
    assert f"there is no {out}; write it: python -m training measure" in missing.out
    assert command(arguments).code == 0
    out.write_text(out.read_text().replace('"trainable_parameters": ', '"trainable_parameters": 1'))
    other = command([*arguments, "--check"])
    assert other.code == 1
    assert "trainable_parameters is 1" in other.out
    assert "measure again: python -m training measure" in other.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recipe=laptop"], "--recipe needs --workload"),
        (["--override=width=9"], "--override needs --workload and --recipe"),
        ([f"--workload={WORKLOAD}", "--recipe=long"], "its `nominal_samples` lack recipe 'long'"),
        (["--workload=trajectory", "--recipe=laptop", "--override=wide=9"], "no field 'wide'"),
    ],
)
def test_fails_for_a_mistake_in_one_sentence(arguments: list[str], says: str) -> None:
    done = command(["measure", *arguments])
    assert done.code == 2
    assert says in done.err
