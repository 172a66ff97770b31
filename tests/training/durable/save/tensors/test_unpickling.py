"""Nothing of a run is ever unpickled: shards, checkpoints, a stage's prior, the final weights."""

import _pickle
import multiprocessing
import multiprocessing.reduction
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests.training import tiny
from tests.training.hooks import at_rank, interrupt_at, notice
from tests.training.runs import Run, assert_equal
from training.cli.main import main


class UnpicklingError(BaseException):
    """Nothing in training may catch it and go on."""


def refuse(*arguments: Any, **named: Any) -> NoReturn:
    raise UnpicklingError("something was unpickled")


def refuse_unpickling(but_in: str | None = None) -> None:
    """In this process from now on, by whatever name somebody may have imported it.

    `but_in` names the function that may, by the class that torch.distributed took at its import.
    """
    for module in (pickle, _pickle):
        for name in ("load", "loads", "Unpickler"):
            setattr(module, name, refuse)
    pickle._Unpickler = pickle._load = pickle._loads = refuse  # type: ignore[attr-defined]
    multiprocessing.reduction.ForkingPickler.loads = refuse  # type: ignore[method-assign]
    torch.load = refuse

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class" and but_in not in callers():
            refuse()

    sys.addaudithook(hear)


def callers() -> set[str]:
    """Names of the functions on the stack."""
    frame, names = sys._getframe(), set[str]()
    while frame.f_back is not None:
        frame = frame.f_back
        names.add(frame.f_code.co_name)
    return names


def code_where_unpickling_raises(arguments: Sequence[str]) -> int | None:
    """The exit code of a command in a separate process where nothing can be unpickled."""

    def act() -> None:
        refuse_unpickling()
        raise SystemExit(main(arguments))

    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(120)
    return process.exitcode


def test_a_run_is_resumed_to_its_end_where_unpickling_raises(
    bucket_uri: str, new_run: Callable[[str], Run], whole: Run, tmp_path: Path
) -> None:
    run = new_run(f"{bucket_uri}/runs/run-1")  # the ranks below have a folder
    for place in (("shard", 1), ("first", 7), ("second", 5)):
        interrupt_at(*place)
        assert code_where_unpickling_raises(run.arguments()) == 75, place
        tiny.HOOKS.clear()
    assert code_where_unpickling_raises(run.arguments()) == 0
    assert_equal(run, whole)
    resumed = [event["checkpoint"] for event in run.events("resumed")]
    assert len(resumed) >= 2
    exported = ["export", f"--run-uri={run.uri}", f"--out={tmp_path / 'exported'}"]
    assert code_where_unpickling_raises(exported) == 0


def test_fails_there_where_a_workload_unpickles(run: Run) -> None:
    data = pickle.dumps(torch.Size([1]))
    tiny.HOOKS["second"] = lambda step: pickle.loads(data)
    assert code_where_unpickling_raises(run.arguments()) == 1
    assert run.lineage().keys() == set(range(1, 13)), "only where it did"


@pytest.mark.slow  # one process does so, too
def test_ranks_resume_their_shares_where_only_messages_between_them_are_unpickled(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(arguments: Sequence[str]) -> int:
        refuse_unpickling(but_in="_tensor_to_object")
        return main(arguments)

    monkeypatch.setattr("tests.training.runs.main", act)
    run.options = ["--override=sharding=full"]
    at_rank(1, ("first", 7), notice)
    assert run.attempt_with_ranks(2) == [75, 75]
    tiny.HOOKS.clear()
    assert run.attempt_with_ranks(2) == [0, 0]
    assert len(run.events("resumed")) == 1
