"""A receipt names every promise that was broken, and none that was kept."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rehearsal.demo import receipt as receipt_of
from rehearsal.demo.children import Children
from rehearsal.demo.deployment import DeployedStacks
from rehearsal.demo.fleet import RehearsalFailed
from rehearsal.demo.receipt import baselines_of, find_faults
from rehearsal.demo.report import receipt_rows, show_receipt, verdict, write_report

GOOD: dict[str, Any] = {
    "workload": "trajectory",
    "recipe": "laptop",
    "facts": {"train_clips": 800, "validation_clips": 100, "chance": 1 / 11},
    "resources": 43,
    "dataset": {"files": 2, "megabytes": 1.0, "megabytes_per_second": 2.0},
    "steps": 10,
    "steps_computed": 12,
    "interruptions": 1,
    "interruption_list": [
        {"what": "notice in head at step 4", "notice": True, "notice_to_commit_seconds": 0.5}
    ],
    "notice_seconds": 15.0,
    "notice_to_commit_seconds": 0.5,
    "steps_lost": 2,
    "validation_accuracy": 0.7,
    "baseline_accuracies": {"single_frame": 0.2, "time_average": 0.3},
    "weights_sha256": "aa",
    "uninterrupted_weights_sha256": "aa",
    "numerics_key": {"threads": 1, "stages": {"head": {"precision": "float32"}}},
    "uninterrupted_numerics_key": {"threads": 1, "stages": {"head": {"precision": "float32"}}},
    "losses_equal": True,
    "samples_have_order": True,
    "rules_broken": [],
    "fleet_target_capacity": 0,
    "instances_running": 0,
    "processes_left": 0,
    "user_data_faults": [],
    "statements": 40,
    "statements_used": 30,
    "denied": [],
    "guard_invocations": 3,
    "guard_errors": [],
    "size": "g5.xlarge",
    "goodput": {"seconds": {"useful": 75.0, "boot": 25.0}, "usd": {"useful": 3.0}, "planned": {}},
}
UNCOMMITTED = [{"what": "notice in head", "notice": True, "notice_to_commit_seconds": None}]


def test_a_good_receipt_has_no_fault() -> None:
    assert find_faults(GOOD, 1) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"weights_sha256": "bb"}, "the weights differ"),
        ({"losses_equal": False}, "the losses differ"),
        ({"numerics_key": {"threads": 2}}, "the numerics keys differ"),
        ({"interruptions": 0}, "0 interruptions happened, not 1"),
        ({"interruption_list": UNCOMMITTED}, "no commit was seen after the notice in head; did"),
        ({"fleet_target_capacity": 1}, "the fleet's target is 1, not 0"),
        ({"instances_running": 1}, "1 instances are still running"),
        ({"processes_left": 2}, "2 processes were left behind"),
        ({"guard_invocations": 0}, "the Guard never ran"),
        (
            {"guard_errors": ["TimeoutError: boom"]},
            "the Guard failed on 1 events, each of them tried 3 times: TimeoutError: boom",
        ),
        ({"rules_broken": ["a sample twice"]}, "a sample twice"),
    ],
)
def test_fails_a_receipt_with_a_broken_promise(change: dict[str, Any], fault: str) -> None:
    faults = find_faults({**GOOD, **change}, 1)
    assert len(faults) == 1
    assert fault in faults[0]


def shown(receipt: dict[str, Any]) -> str:
    out, faults = io.StringIO(), find_faults(receipt, 1)
    rows = [("verdict", verdict(receipt, faults)), *receipt_rows(receipt)]
    show_receipt(rows, Console(file=out, width=120))
    return out.getvalue()


def test_the_table_shows_both_hashes_and_the_verdict_but_not_the_key() -> None:
    text = shown({**GOOD, "uninterrupted_weights_sha256": "bb"})
    assert "threads" not in text
    said = "0.700; single frame 0.200; time average 0.300: 0.400 above the best of these"
    assert said in text
    assert "│ aa " in text
    assert "│ bb " in text
    assert "NO" in text
    assert "yes, weights and losses" in shown(GOOD)


def test_a_guard_that_was_tried_again_broke_no_promise() -> None:
    once = {**GOOD, "guard_retries": 1}
    assert find_faults(once, 1) == [], "Lambda tries again, too"
    assert "1 of them retries after an error" in shown(once)
    assert "Every promise was kept" in shown(once).splitlines()[2]


def test_a_run_without_an_accuracy_shows_the_first_metric_of_each_stage() -> None:
    stages = {"dense": {"perplexity": 9.5, "loss": 2.25}, "grown": {"perplexity": 7.25}}
    text = shown({**GOOD, "validation_accuracy": None, "stages": stages})
    assert "validation perplexity" in text
    assert "dense 9.5; grown 7.25" in text


def test_the_machine_that_finished_is_said_to_have_finished() -> None:
    lives = {
        name: SimpleNamespace(
            instance=SimpleNamespace(id=name, type="g5.xlarge"),
            started=0.0,
            seconds=1.0,
            reason=reason,
            processes_killed=0,
            first_progress=None,
            first_step=None,
        )
        for name, reason in (("i-1", "killed without a notice"), ("i-2", "capacity decreased"))
    }
    head = json.dumps({"state": "finished", "writer": "i-2"}).encode()
    files = SimpleNamespace(read=lambda name: head, sizes=lambda prefix: {})
    run = SimpleNamespace(fleet=SimpleNamespace(lives=lives), files=files)
    rehearsed = SimpleNamespace(lives=list(lives.values()), run=run)
    ended = [machine["ended"] for machine in receipt_of._machines(rehearsed)]  # type: ignore[arg-type]
    assert ended == ["killed without a notice", "finished"]


def test_it_says_what_the_money_bought() -> None:
    assert "$3.00 for 1 min 40 s of machines, 75% of it useful" in shown(GOOD)


def test_the_stages_before_the_last_are_what_it_is_judged_by() -> None:
    stages = {
        "single_frame": {"accuracy": 0.2, "loss": 2.0},
        "tokenizer": {"psnr": 24.0},
        "head": {"accuracy": 0.7},
    }
    assert baselines_of(stages) == {"single_frame": 0.2}


def test_fails_a_deploy_that_lacks_a_resource_and_names_it(tmp_path: Path) -> None:
    lacks_one = SimpleNamespace(missing_resources=lambda names: [f"{names[-1]}/FleetRequest"])
    children = Children(say=print, environment={}, folder=tmp_path)
    stacks = DeployedStacks(
        folder=tmp_path, aws=SimpleNamespace(engine=lacks_one), children=children
    )
    with pytest.raises(RehearsalFailed, match=r"missing: [A-Za-z]+-TrainingStack/FleetRequest"):
        stacks.check_resources()


def test_equal_bits_are_called_no_proof_of_an_order_that_cannot_differ() -> None:
    """Steps that see the whole dataset are equal in any order of its samples."""
    assert "of the samples' order" not in verdict(GOOD | {"samples_have_order": True}, [])
    said = verdict(GOOD | {"samples_have_order": False}, [])
    assert said.endswith(
        "Each step saw the entire dataset, so this proves nothing about the order of samples: "
        "use more data than one batch."
    )


def test_an_accuracy_is_said_to_be_a_share_of_samples_held_out() -> None:
    rows = dict(receipt_rows(GOOD))
    said = "of 100 clips held out of the training on 800 clips, the share classified right"
    assert rows["which means"] == f"{said}; a guess has 0.091"
    assert "which means" not in dict(receipt_rows(GOOD | {"facts": {}}))


def test_a_tiny_dataset_has_no_rate() -> None:
    tiny = {"files": 2, "megabytes": 0.004, "megabytes_per_second": 0.1}
    rows = dict(receipt_rows(GOOD | {"dataset": tiny}))
    assert rows["dataset synced"] == "2 files, less than 1 MB: too little for a rate"


@pytest.mark.parametrize("faults", [[], ["the weights differ <here>"]])
def test_the_page_begins_with_the_verdict_and_each_broken_promise(
    tmp_path: Path, faults: list[str]
) -> None:
    machine = {"instance": "i-1", "at": 0.0, "seconds": 9.0, "ended": "killed"}
    receipt = GOOD | {
        "machines": [machine | {"seconds_to_first_progress": 4.0}],
    }
    steps = [{"step": step, "loss": 1.0, "generation": step} for step in (1, 2)]
    rows = receipt_rows(receipt)
    write_report(tmp_path / "page.html", receipt, {"head": (steps, steps)}, rows, faults)
    text, _, rest = (tmp_path / "page.html").read_text().partition("<h2>")
    first = ("trained", "validation accuracy", "which means", "it bought", "steps lost")
    assert all(f"<td>{name}</td>" in text and f"<td>{name}</td>" not in rest for name in first)
    assert f'class="verdict {"bad" if faults else "good"}"' in text
    assert ("the uninterrupted run&#x27;s, bit for bit." in text) == (not faults)
    assert ("<li>the weights differ &lt;here&gt;</li>" in text) == bool(faults)
