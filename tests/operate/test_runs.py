"""Which run or sweep is meant, where an account has two of a name; a run's status."""

import json
import re
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from contract.errors import UserError
from contract.stack_names import DESCRIPTIONS
from operate import control
from operate.download import download, open_report
from operate.runs import OperatedRun, find_run
from operate.status import Sight, _waits_for, cost_of, list_runs, look, read_status
from operate.sweeps import find_operated_sweep
from operate.verify import verify_run
from stacks.guard.fleet import ON_DEMAND, SpotFleet, StackInstance
from stacks.guard.ledger import Ledger
from stacks.guard.settings import Forecast, GuardSettings
from tests.page_policies import DOCS, policy
from tests.stack_names import named
from training.durable import Head, SweptRuns


class _Stacks:
    """CloudFormation with two stacks that train one run, or other stacks by name."""

    def __init__(self, **outputs: dict[str, str]) -> None:
        both = {"RunUri": "s3://runs/runs/run-1", "GuardFunction": "g"}
        self._outputs = outputs or {"A": both, "B": both}

    def get_paginator(self, name: str) -> "_Stacks":
        return self

    def paginate(self) -> list[dict[str, Any]]:
        about = {"Description": DESCRIPTIONS["TrainingStack"], "StackStatus": "UPDATE_COMPLETE"}
        stacks = [{"StackName": name, **about} for name in self._outputs]
        for stack, outputs in zip(stacks, self._outputs.values(), strict=True):
            stack["Outputs"] = [{"OutputKey": k, "OutputValue": v} for k, v in outputs.items()]
        return [{"Stacks": stacks}]


def test_a_stack_without_what_runs_needs_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As 0.1.0 deployed it; it may have a machine."""
    uri = f"{tmp_path}/old-1"
    old = _Stacks(TrainingStack={"RunUri": uri, "FleetIdOutput": "sfr-1"})
    monkeypatch.setattr("operate.runs.quick_client", lambda _: old)
    monkeypatch.setattr("operate.runs.checked", lambda _: None)
    monkeypatch.setattr("operate.runs.runs_at", lambda _: [OperatedRun(uri=uri)])
    run = find_run("old-1")
    assert run.stack == "TrainingStack"
    with pytest.raises(UserError, match="Stack of old-1 is older than `runs`; deploy it again"):
        look(run)


def test_which_of_two_stacks_of_a_run_is_meant_must_be_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operate.runs.quick_client", lambda _: _Stacks())
    monkeypatch.setattr("operate.runs.checked", lambda _: None)
    monkeypatch.setattr("operate.runs.runs_at", lambda _: [])
    with pytest.raises(UserError, match="run-1 of A, s3://runs/runs/run-1 of B"):
        find_run("run-1")
    assert find_run("B").stack == "B"


def test_a_stack_has_the_cdk_clis_name_too_and_who_finds_none_is_told_the_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = {"RunUri": "s3://runs/runs/run-1"}
    stacks = _Stacks(**{"SpotTraining-TrainingStack": output, "Team-Training-a": output})
    monkeypatch.setattr("operate.runs.quick_client", lambda _: stacks)
    monkeypatch.setattr("operate.runs.checked", lambda _: None)
    monkeypatch.setattr("operate.runs.runs_at", lambda _: [])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-9")
    assert find_run("TrainingStack").stack == "SpotTraining-TrainingStack"
    assert find_run("Training-a").stack == "Team-Training-a"
    with pytest.raises(UserError, match=r"which run is run-2.* In this account and eu-west-9: "):
        find_run("run-2")


def test_which_of_two_sweeps_of_a_name_is_meant_must_be_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = types.SimpleNamespace(folders=lambda _: ["rates"])
    stores = {f"s3://{each}/sweeps": place for each in "ab"}
    monkeypatch.setattr("operate.sweeps.run_buckets", lambda: ["a", "b"])
    monkeypatch.setattr("operate.sweeps.open_store", stores.__getitem__)
    monkeypatch.setattr(
        SweptRuns, "at", lambda uri: types.SimpleNamespace(store=types.SimpleNamespace(uri=uri))
    )
    with pytest.raises(UserError, match=r"which sweep is rates.* s3://a/sweeps/rates, s3://b/"):
        find_operated_sweep("rates")


def test_a_status_is_of_the_runs_own_machines_and_of_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast = Forecast(
        stages={"head": 7200.0}, restart_seconds=1000.0, save_seconds=1.0, interval_seconds=60.0
    )
    given = {"STACK_NAME": "T", "FLEET_PARAMETER": "/T/fleet-id", "RUN_BUCKET": "runs",
             "RUN_PREFIX": "runs/mine", "TOPIC_ARN": "t", "MAX_BILLED_HOURS": "72", "MAX_USD": "9",
             "MAX_WAIT_HOURS": "0", "HEARTBEAT_TIMEOUT_SECONDS": "3600", "NOTICE_SECONDS": "120",
             "MAX_BARREN_ATTEMPTS": "3", "STORAGE_USD_PER_HOUR": "0.05",
             "USD_PER_HOUR": '{"g5.xlarge": {"spot": 0.5, "on-demand": 1.0}}'}  # fmt: skip

    class Run(OperatedRun):
        folder = None
        settings: Any = replace(GuardSettings.from_environment(given), forecast=forecast)

    run = Run(uri=f"{tmp_path}/mine", stack="T", outputs={"FleetIdOutput": "sfr-1"})
    now = time.time()
    machines = [
        StackInstance(
            id=f"i-{run_id}", run_id=run_id, fleet_id="sfr-1", size="g5.xlarge", market=ON_DEMAND,
            launched=now - seconds, is_live=True,
        )
        for run_id, seconds in (("mine", 3600.0), ("before", 36_000.0))
    ]  # fmt: skip
    monkeypatch.setattr("operate.status.instances_of_stack", lambda _: machines)
    monkeypatch.setattr("operate.status.spot_prices", lambda _: {})
    monkeypatch.setattr(SpotFleet, "read_capacity", lambda _: (1, 1))
    head = {"format": 1, "run_id": "mine", "generation": 1, "writer": "i-mine", "nonce": "a",
            "state": "running", "checkpoints": []}  # fmt: skip
    run.store.put("head.json", json.dumps(head).encode())
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now - 200))
    run.store.put(f"events/{when}.000000Z-i-mine-committed.json", b"{}")
    found = read_status(run)
    assert (found["state"], found["machine"], found["usd_limit"]) == ("running", "i-mine", 9)
    # Since the last commit, 200 of its 7,200 seconds are done; no other machine has to start.
    assert found["seconds_left"] == pytest.approx(7000, abs=30)
    assert found["usd_to_come"] == pytest.approx(1.05 * 7000 / 3600, abs=0.02)
    assert found["usd_spent"] == pytest.approx(1.05, abs=0.02)


def test_a_run_that_no_stack_trains_any_more_costs_what_its_last_guard_saw(tmp_path: Path) -> None:
    """Its machine seemed to run, and to cost, to this day: the next run's Guard looks elsewhere."""
    attempt = {"launched": 1000.0, "seen": 4600.0, "is_live": True, "usd": 0.5, "usd_per_hour": 0.5}
    run = OperatedRun(uri=f"{tmp_path}/mine")
    guard = {"format": 2, "attempts": {"i-1": attempt}, "waiting": 4600.0}
    run.store.put("guard.json", json.dumps(guard).encode())
    rows, bought = cost_of(run)
    assert [(row["usd"], row["is_live"]) for row in rows] == [(0.5, False)]
    assert sum(bought.usd.values()) == pytest.approx(0.5)
    assert sum(bought.seconds.values()) == pytest.approx(3600)


def test_what_has_not_begun_is_not_said_to_be_at_the_wrong_uri(tmp_path: Path) -> None:
    run = OperatedRun(uri=f"{tmp_path}/mine", stack="T")
    acts: list[Callable[[], object]] = [
        lambda: verify_run(run),
        lambda: download(run, None, None),
        lambda: open_report(run, in_browser=False),
    ]
    for act in acts:
        with pytest.raises(UserError, match=r"^mine has no head\.json; what it waits for: runs st"):
            act()


class _Asked(OperatedRun):
    """A run of a stack whose fleet wants, and what was asked of it."""

    folder = None
    settings: Any = types.SimpleNamespace(on_demand_base=0)


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_resume_says_whether_it_has_requested_a_machine_and_records_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wanted: int,
) -> None:
    asked = list[int]()
    monkeypatch.setattr(SpotFleet, "read_capacity", lambda _: (wanted, 0))
    monkeypatch.setattr(SpotFleet, "set_capacity", lambda _, capacity, base: asked.append(capacity))
    run = _Asked(uri=f"{tmp_path}/mine", stack="T", outputs={"FleetIdOutput": "sfr-1"})
    assert control.resume(run, "lunch is over")["done"] == "resumes from step 0"
    events = [json.loads(path.read_text()) for path in tmp_path.glob("mine/events/*")]
    if wanted:
        assert (asked, events) == ([], [])
        assert "its fleet requests one already; `runs status mine`" in capsys.readouterr().err
    else:
        assert asked == [1]
        assert [(each["name"], each["source"]) for each in events] == [("requested", "person")]
        assert events[0]["message"].endswith(": lunch is over")


def test_a_stop_before_the_first_commit_claims_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_stop_fleet", lambda run, reason: None)
    run = _Asked(uri=f"{tmp_path}/mine", stack="T")
    assert control.stop(run, "")["done"] == "is stopped, before its first commit"


@pytest.mark.parametrize(
    ("name", "says"),
    [("to-zero", "`runs resume mine`, once repaired (to-"), ("stopped", "`runs resume mine` (st")],
)
def test_a_run_that_the_guard_stopped_waits_for_a_repair_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    run = _Asked(uri=f"{tmp_path}/mine", stack="T")
    run.store.put(
        f"events/20260101T000000.0Z-x-{name}.json",
        json.dumps({"name": name, "message": "max_usd is 5", "instance_id": "x",
                    "time": "2026-01-01T00:00:00Z"}).encode(),
    )  # fmt: skip
    sight = Sight(run=run, now=time.time(), head=None, ledger=Ledger())
    assert sight.state == "stopped"
    waits = _waits_for(sight, [*run.store.sizes("events/")])
    assert waits is not None
    assert waits.startswith(says)


def test_a_run_in_a_folder_is_silent_without_a_heartbeat_for_two_minutes(tmp_path: Path) -> None:
    head = types.SimpleNamespace(state="running", is_ended=False)
    (tmp_path / "head.json").touch()
    now, run = time.time(), OperatedRun(uri=str(tmp_path))
    for seconds, state in ((60, "running"), (150, "silent")):
        sight = Sight(run=run, now=now + seconds, head=cast(Head, head), ledger=Ledger())
        assert sight.state == state


def test_a_stop_signals_the_process_that_started_the_ranks_and_not_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[int]()
    info = {"cmdline": ["python", "-m", "training", "run", f"--run-uri={tmp_path}"], "cwd": "/"}
    processes = [
        types.SimpleNamespace(
            pid=pid, info={**info, "ppid": ppid}, terminate=lambda pid=pid: ended.append(pid)
        )
        for pid, ppid in ((7, 1), (8, 7), (9, 7))
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda _: processes)
    monkeypatch.setattr(psutil, "wait_procs", lambda _: None)
    control.stop_process(tmp_path)
    assert ended == [7]


def test_the_operators_policy_acts_on_machines_of_the_stack_alone() -> None:
    """A shell on any other instance of the account would be its role's rights, and root."""
    acts = 0
    for each in policy("runs.md")["Statement"]:
        actions, resources = str(each["Action"]), str(each["Resource"])
        if "instance/" in resources and "Describe" not in actions:
            (condition,) = each["Condition"].values()
            assert [*condition.values()] == [named("TrainingStack")], each["Sid"]
            acts += 1
    assert acts == 2


def test_the_operators_policy_opens_the_channel_of_their_own_sessions_alone() -> None:
    """session-manager-plugin signs it since 1.2.764.0: without it, a shell ends as it begins."""
    found = [each for each in policy("runs.md")["Statement"] if "OpenData" in str(each["Action"])]
    assert [each["Resource"] for each in found] == ["arn:aws:ssm:*:*:session/${aws:userid}-*"]


def test_every_page_names_the_tag_that_machines_have() -> None:
    found = [
        name
        for page in DOCS.rglob("*")
        if page.suffix in (".md", ".json")
        for name in re.findall(
            r'tag:Stack,Values=([\w-]+)|Tag/Stack": "([\w-]+)"', page.read_text()
        )
    ]
    assert len(found) >= 3
    assert {"".join(each) for each in found} == {named("TrainingStack")}


def test_a_run_that_never_began_is_listed_with_what_it_has_cost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its stack is gone: else the dollars of the account's runs are too few."""
    (tmp_path / "never").mkdir()
    (tmp_path / "never" / "guard.json").write_bytes(Ledger().to_json())
    (tmp_path / "empty").mkdir()
    kept = [OperatedRun(uri=f"{tmp_path}/{name}") for name in ("never", "empty")]
    monkeypatch.setattr("operate.status.account_runs", lambda: kept)
    assert [(row["run"], row["state"]) for row in list_runs(None)] == [("never", "interrupted")]
