"""A program's folder as the demo deploys it, and the receipt of its rehearsal."""

from pathlib import Path
from typing import Any

import pytest

from rehearsal.drill.program import RehearsedProgram
from rehearsal.drill.receipt import find_faults
from rehearsal.drill.report import receipt_rows
from stacks.parameters import StackParameters
from stacks.parameters.programs import program_of

EXAMPLES = Path(__file__).parents[3] / "examples"
GOOD: dict[str, Any] = {
    "statements": 40,
    "statements_used": 30,
    "denied": [],
    "resources": 43,
    "dataset": {"files": 2, "megabytes": 1.0, "megabytes_per_second": 2.0},
    "program": "python train.py",
    "steps": 100,
    "steps_redone": 12,
    "seconds_lost": 3.5,
    "snapshots": 7,
    "attempts": 2,
    "interruptions": 1,
    "interruption_list": [
        {"what": "kill without notice at step 40, 12 steps done again", "notice": False}
    ],
    "last_metrics": {"loss": 0.5, "step": 100},
    "uninterrupted_last_metrics": {"loss": 0.4},
    "final_files": {"model/model.pth": "aa"},
    "uninterrupted_final_files": {"model/model.pth": "aa"},
    "fleet_target_capacity": 0,
    "instances_running": 0,
    "processes_left": 0,
    "user_data_faults": [],
    "guard_invocations": 3,
    "guard_errors": [],
    "size": "g5.xlarge",
    "billed_seconds": 108.0,
    "usd_on_demand": 0.03,
    "usd_spot": 0.01,
    "spot_price_basis": "snapshot",
    "spent": {"by_market": {}, "moves": 0},
}


@pytest.mark.parametrize("name", ["plain", "huggingface", "lightning"])
def test_the_stack_deploys_what_the_folder_says(name: str) -> None:
    program = RehearsedProgram.from_folder(EXAMPLES / name, None)
    parameters = StackParameters.for_size("g5.xlarge", **program.context())
    assert program_of(parameters) == program.spec
    assert parameters.dataset == name


def test_fails_on_a_folder_that_lacks_what_the_demo_needs(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"mine has no program\.json; write it, with at least"):
        RehearsedProgram.from_folder(folder, None)
    (folder / "program.json").write_text('{"command": "python train.py"}')
    with pytest.raises(ValueError, match=r"no data found for .*mine; pass their folder \(--data"):
        RehearsedProgram.from_folder(folder, None)
    with pytest.raises(ValueError, match="nothing is not a folder; --data takes the folder of"):
        RehearsedProgram.from_folder(folder, tmp_path / "nothing")
    (folder / "program.json").write_text('{"comand": "python train.py"}')
    with pytest.raises(ValueError, match='has no "command"; add'):
        RehearsedProgram.from_folder(folder, tmp_path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"attempts": 3}, "3 attempts for 1 interruptions: one failed"),
        (
            {"final_files": {}},
            "the run left nothing in its model folder, but the uninterrupted one model/",
        ),
        ({"interruptions": 0, "attempts": 1}, "0 interruptions happened, not 1"),
        ({"processes_left": 2}, "2 processes were left behind"),
    ],
)
def test_fails_a_rehearsal_that_did_not_end_as_planned(change: dict[str, Any], fault: str) -> None:
    assert find_faults(GOOD, 1) == []
    (found,) = find_faults({**GOOD, **change}, 1)
    assert found.startswith(fault)


def test_a_program_may_end_within_its_last_notice() -> None:
    noticed = [{"what": "notice at step 90, 0 steps done again", "notice": True}]
    assert find_faults({**GOOD, "attempts": 1, "interruption_list": noticed}, 1) == []
    assert len(find_faults({**GOOD, "attempts": 1}, 1)) == 1


def test_the_receipt_says_honestly_whether_the_result_is_the_same() -> None:
    assert ("equal bit for bit", "yes") in receipt_rows(GOOD)
    rows = dict(receipt_rows({**GOOD, "uninterrupted_final_files": {"model/model.pth": "bb"}}))
    assert rows["equal bit for bit"].startswith("no: this program's result depends")
    assert rows["steps"] == "100 in the run, 12 of them done again"
    # What its metrics do not name is not made up.
    assert dict(receipt_rows({**GOOD, "steps_redone": None}))["steps"] == "100 in the run"
