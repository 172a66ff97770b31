"""Which run or sweep is meant, where an account has two of a name."""

import re
import types
from pathlib import Path
from typing import Any

import pytest

from contract.errors import UserError
from contract.stack_names import DESCRIPTIONS
from operate.runs import OperatedRun, find_run
from operate.status import look
from operate.sweeps import find_operated_sweep
from tests.page_policies import DOCS, policy
from tests.stack_names import named
from training.durable import SweptRuns


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
