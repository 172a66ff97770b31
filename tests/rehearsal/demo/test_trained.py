"""A program's folder as the demo deploys it, and the receipt of its rehearsal."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from contract.description import WorkloadDescription
from contract.grammar import parse_interval
from rehearsal.demo.actions import parse_interruption
from rehearsal.demo.receipt import find_faults
from rehearsal.demo.report import receipt_rows, verdict
from rehearsal.demo.trained import DEFAULTS, RehearsedProgram, by_workload, own_defaults
from stacks.parameters import StackParameters
from stacks.parameters.programs import program_of
from training.registry import WORKLOADS, load_workload
from training.workload import Train

EXAMPLES = Path(__file__).parents[3] / "examples"
GOOD: dict[str, Any] = {
    "rules_broken": [],
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
    "uninterrupted_last_metrics": {"loss": 0.5},
    "final_files": {"model/model.pth": "aa"},
    "uninterrupted_final_files": {"model/model.pth": "aa"},
    "fleet_target_capacity": 0,
    "instances_running": 0,
    "processes_left": 0,
    "user_data_faults": [],
    "guard_invocations": 3,
    "warnings": ['no snapshot: add "keep": ["outputs"]'],
    "guard_errors": [],
    "size": "g5.xlarge",
    "goodput": {"seconds": {}, "usd": {}, "planned": {}},
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
        ({"snapshots": 0}, "it saved nothing that is kept, so an interruption loses everything"),
    ],
)
def test_fails_a_rehearsal_that_did_not_end_as_planned(change: dict[str, Any], fault: str) -> None:
    assert find_faults(GOOD, 1) == []
    (found,) = find_faults({**GOOD, **change}, 1)
    assert found.startswith(fault)


def test_a_program_that_leaves_only_checkpoints_breaks_no_promise() -> None:
    assert find_faults({**GOOD, **ONLY_CHECKPOINTS}, 1) == []
    assert find_faults({**GOOD, "final_files": {}, "uninterrupted_final_files": {}}, 1) == []
    assert "It left no file to compare" in verdict({**GOOD, "final_files": {}}, [])
    assert "compare" not in verdict({**GOOD, **ONLY_CHECKPOINTS}, [])


def test_a_program_may_end_within_its_last_notice() -> None:
    noticed = [{"what": "notice at step 90, 0 steps done again", "notice": True}]
    assert find_faults({**GOOD, "attempts": 1, "interruption_list": noticed}, 1) == []
    assert len(find_faults({**GOOD, "attempts": 1}, 1)) == 1


SAVED = {"checkpoints/best.pt": "bb", "checkpoints/last.pt": "cc"}
ONLY_CHECKPOINTS: dict[str, Any] = {
    "final_files": {},
    "uninterrupted_final_files": {},
    "checkpoint_files": SAVED,
    "uninterrupted_checkpoint_files": SAVED,
}
DEPENDS = "no: this program's result depends on its interruptions"
BYTES = "no: a saved file's bytes may differ although its tensors are equal"


def losses(*values: float, generation: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": loss, "generation": generation}
        for step, loss in enumerate(values, start=1)
    ]


def test_what_a_program_was_warned_of_is_in_its_receipt() -> None:
    assert ("warning", GOOD["warnings"][0]) in receipt_rows(GOOD)


def equality(**change: Any) -> str:
    return dict(receipt_rows({**GOOD, **change}))["equal bit for bit"]


@pytest.mark.parametrize(
    ("change", "word", "parts"),
    [
        ({}, "yes", ["files: all 1 equal", "reported losses: all 1 equal"]),
        (
            {"last_metrics": {"loss": 0.0031}, "uninterrupted_last_metrics": {"loss": 0.0116}},
            DEPENDS,
            ["files: all 1 equal", "reported losses: 1 of 1 differ"],
        ),
        (
            # What was done again counts as it was done last.
            {
                "losses": [*losses(0.9, 0.8), *losses(0.9, 0.7, 0.6, generation=2)[1:]],
                "uninterrupted_losses": losses(0.9, 0.7, 0.5, 0.4),
            },
            DEPENDS,
            ["reported losses: 1 of 3 differ, first 3"],
        ),
        (
            {"losses": losses(0.9), "uninterrupted_losses": losses(0.9, 0.8)},
            "yes",
            ["reported losses: all 1 equal"],
        ),
        (
            {"last_metrics": {}, "uninterrupted_last_metrics": {"accuracy": 0.5}},
            "yes",
            ["reported losses: not compared, as the runs have none in common"],
        ),
        (ONLY_CHECKPOINTS, "yes", ["files: all 2 equal"]),
        (
            {"uninterrupted_final_files": {"model/model.pth": "bb"}, "last_metrics": {}},
            DEPENDS,
            ["files: 1 of 1 differ, first model/model.pth"],
        ),
        (
            {"uninterrupted_final_files": {"model/model.pth": "bb"}},
            BYTES,
            ["files: 1 of 1 differ, first model/model.pth", "losses: all 1 equal"],
        ),
        (
            {
                **ONLY_CHECKPOINTS,
                "uninterrupted_checkpoint_files": {**SAVED, "checkpoints/last.pt": "dd"},
            },
            BYTES,
            ["files: 1 of 2 differ, first checkpoints/last.pt", "losses: all 1 equal"],
        ),
        (
            {**ONLY_CHECKPOINTS, "uninterrupted_checkpoint_files": {}, "last_metrics": {}},
            DEPENDS,
            ["files: 2 of 2 differ", "losses: not compared"],
        ),
        (
            {"final_files": {}, "uninterrupted_final_files": {}},
            "not compared",
            ["files: not compared, as the runs have none in common", "all 1 equal"],
        ),
    ],
)
def test_the_receipt_says_what_was_compared_and_what_not(
    change: dict[str, Any], word: str, parts: list[str]
) -> None:
    said = equality(**change)
    assert said.startswith(f"{word};"), said
    assert [part for part in parts if part not in said] == []


def test_the_receipt_makes_nothing_up() -> None:
    rows = dict(receipt_rows(GOOD))
    assert rows["steps"] == "100 in the run, 12 of them done again"
    # A machine that is killed cannot tell all that it has lost.
    assert rows["time lost"].startswith("at least 3.5 s")
    noticed = [{"what": "notice at step 40", "notice": True}]
    exact = dict(receipt_rows({**GOOD, "interruption_list": noticed}))
    assert exact["time lost"].startswith("3.5 s")
    rows = dict(receipt_rows({**GOOD, "steps": 0, "steps_redone": None}))
    assert rows["steps"] == "none reported"
    rows = dict(receipt_rows({**GOOD, "steps_redone": None, **ONLY_CHECKPOINTS}))
    assert rows["steps"] == "100 in the run"
    assert rows["model"] == "checkpoints/best.pt, checkpoints/last.pt"


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_known_workload_is_interrupted_in_stages_that_it_has_in_their_order(name: str) -> None:
    workload = load_workload(name)
    stages = workload.stages(workload.recipes[DEFAULTS[name].recipe]())
    order = [stage.name for stage in stages]
    planned = [parse_interruption(text) for text in DEFAULTS[name].interruptions]
    places = [order.index(each.stage) for each in planned]
    assert len(places) >= 2 and places == sorted(places)
    for each, place in zip(planned, places, strict=True):
        stage = stages[place]
        if isinstance(stage, Train) and stage.settings.steps is not None:
            assert int(each.at.partition(":")[2]) < stage.settings.steps
    assert parse_interval(DEFAULTS[name].checkpoint_interval).value > 0


def test_a_workload_of_one_s_own_loses_two_machines_in_its_last_stage() -> None:
    stages = {"first": 90, "last": 36}
    known = WorkloadDescription(recipe="full", stages=stages, num_samples=300, makes_data=True)
    assert own_defaults(known).interruptions == ("kill:last:12", "notice:last:24")
    assert own_defaults(known).count == 300
    unknown = dataclasses.replace(known, stages={"only": None}, num_samples=0)
    assert own_defaults(unknown).interruptions == ("kill:only:4", "notice:only:8")
    assert own_defaults(unknown).count == 1000


def test_the_count_of_each_known_workload_is_shown() -> None:
    shown = "default: 264 for trajectory, 12000 for growth, 1200 for imagenet, 60 for detection"
    assert by_workload("count") == shown
