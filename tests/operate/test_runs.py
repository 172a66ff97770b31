"""Which run or sweep is meant, where an account has two of a name."""

import types
from typing import Any

import pytest

from contract.errors import UserError
from contract.stack_names import DESCRIPTIONS
from operate.runs import find_run
from operate.sweeps import find_operated_sweep
from training.durable import SweptRuns


class _Stacks:
    """CloudFormation with two stacks that train one run."""

    def get_paginator(self, name: str) -> "_Stacks":
        return self

    def paginate(self) -> list[dict[str, Any]]:
        outputs = {"RunUri": "s3://runs/runs/run-1", "GuardFunction": "g"}
        listed = [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()]
        about = {"Description": DESCRIPTIONS["TrainingStack"], "StackStatus": "UPDATE_COMPLETE"}
        return [{"Stacks": [{"StackName": n, "Outputs": listed, **about} for n in ("A", "B")]}]


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
