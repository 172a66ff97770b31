"""Killed at any moment, a run equals the uninterrupted one; and the torture is shown to fail."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import UserError
from tests.training.forked import Done, command
from tests.training.proof.torture import broken
from training.cli.main import main
from training.proof.torture import command as torture_command
from training.proof.torture.series import KINDS
from training.proof.torture.small_workload import _Classify

ROOT = Path(__file__).parents[4]


def torture(*arguments: str, bug: str = "") -> tuple[Done, dict[str, Any]]:
    """The command in a fork of this process, and its result; with a bug of `broken` in there."""
    before = getattr(broken, bug) if bug else lambda: None
    done = command(["torture", *arguments, "--json"], before)
    return done, json.loads(done.out)


def test_a_kill_of_every_kind_changes_no_bit() -> None:
    # As many as draw each kind; the runs that they take are of nearly every recipe.
    # Four ranks are the long proof's.
    options = ["--seed=1", "--override=epochs=4", "--num-processes=1,2"]
    done, result = torture(f"--kills={sum(KINDS.values()) + 2}", *options)
    assert result["differences"] == []
    assert done.code == 0
    assert result["kills"] >= 25
    assert result["fresh_attempts"] >= 2
    assert result["faults"] > 0
    assert len(result["by_kind_and_phase"]) >= 5, "kills hit different phases"
    # The deck's one card of a held rank may come where the run ends first.
    assert set(KINDS) - set().union(*result["by_kind_and_phase"].values()) <= {"held"}
    assert result["dated_notices"] == sum(result["dated_ended_by"].values())
    assert len(result["runs_with"].pop("recipe")) >= 4
    # A sharded run has one number of ranks until its end.
    assert {"1,2"} <= set(result["runs_with"].pop("ranks")) <= {"1,2", "1", "2"}
    assert {what: set(cards) for what, cards in result["runs_with"].items()} == {
        "interval": {"5steps", "1epochs", "0.1s", "auto"},
        "save": {"staged", "streamed"},
    }
    assert set(result["attempts_by_ranks"]) == {"1", "2"}
    assert len(result["by_kind_and_ranks"]) >= 2, "kills of all ranks and of one"


def test_steps_may_need_any_memory_where_none_is_left_for_copies() -> None:
    def need_memory() -> None:
        loss = _Classify.loss

        def loss_with_memory(self: _Classify, *arguments: Any) -> Any:
            torch.empty(2**30, dtype=torch.uint8)  # the system gives pages when they are written
            return loss(self, *arguments)

        _Classify.loss = loss_with_memory  # type: ignore[method-assign]

    options = ["--kills=1", "--seed=6", "--recipe=plain", "--num-processes=1", "--json"]
    result = json.loads(command(["torture", *options], need_memory).out)
    # The first run; more follow where it ends before its kill's moment comes.
    assert result["runs_with"]["save"]["streamed"] == 1
    assert result["differences"] == []


@pytest.mark.slow
def test_a_workload_of_this_project_needs_no_count() -> None:
    done, result = torture("--workload=imagenet", "--kills=1")
    assert done.code == 0, done.err
    assert result["kills"] == 1


@pytest.mark.slow
def test_two_hundred_kills_change_no_bit_and_notices_gain_steps() -> None:
    done, result = torture("--kills=200", "--seed=900", "--seeds=5")
    assert result["differences"] == []
    assert done.code == 0
    assert result["kills"] >= 200
    assert set().union(*result["by_kind_and_phase"].values()) == set(KINDS)
    assert set(result["attempts_by_ranks"]) == {"1", "2", "4"}
    assert 0 < result["dated_trained_on"] <= result["dated_notices"]
    assert result["steps_gained"] > 0


@pytest.mark.slow
def test_four_hosts_of_two_ranks_give_the_bits_of_one_rank_whichever_is_lost() -> None:
    sizes = "--num-processes=4x2,4x2,2x4,1"
    done, result = torture("--kills=50", "--seed=37", sizes, "--override=micro_batch=2")
    assert result["differences"] == []
    assert done.code == 0
    assert {"1", "2x4", "4x2"} == set(result["attempts_by_ranks"])
    lost = [who for who, kinds in result["by_kind_and_ranks"].items() if "kill" in kinds]
    assert [who for who in lost if who.startswith("host ")], "hosts were lost"


# Which kill finds a bug depends on the machine's speed; the first six do as a rule.
MANY = ["--kills=40", "--exitfirst"]


@pytest.mark.parametrize(
    ("bug", "options", "says"),
    [
        # Ranks that share a model look at the store before they publish: it gets no further there.
        pytest.param(
            "answers_before_it_wrote",
            ["--recipe=plain,average,bfloat16,float16"],
            "the head names checkpoints/",
            marks=pytest.mark.bughunt,
        ),
        pytest.param("draws_noise_that_is_not_derived", [], "loss is ", marks=pytest.mark.bughunt),
        # Each time, so that every green run has shown that the torture can fail.
        ("forgets_the_optimizer", [], "the first tensor that differs is "),
    ],
)
def test_a_known_bug_of_the_engine_is_found_and_named(
    tmp_path: Path, bug: str, options: list[str], says: str
) -> None:
    done, result = torture(*MANY, *options, f"--out={tmp_path / 'out'}", bug=bug)
    assert done.code == 1, done.err
    assert not result["is_equal"]
    assert [line for line in result["differences"] if says in line], result["differences"]
    assert f"runs and logs are kept in {tmp_path / 'out'}" in done.err


ONE = ["--seed=5", "--recipe=plain", "--num-processes=1", "--checkpoint-interval=5steps"]


@pytest.mark.slow  # `make bughunt` runs them, CI only those above
@pytest.mark.bughunt
@pytest.mark.parametrize(
    ("bug", "breadth", "says"),
    [
        ("forgets_the_moving_average", ["--recipe=average"], "evaluation after step "),
        ("forgets_the_loss_scaler", ["--recipe=float16"], "loss is "),
        ("forgets_the_other_ranks", ["--num-processes=2"], "loss is "),
    ],
)
def test_a_bug_of_some_runs_alone_is_found_where_they_are_drawn(
    tmp_path: Path, bug: str, breadth: list[str], says: str
) -> None:
    narrow, _ = torture("--kills=4", *ONE, bug=bug)
    assert narrow.code == 0, "what it does not run it cannot find"
    wide, result = torture(*MANY, *ONE, *breadth, f"--out={tmp_path / 'out'}", bug=bug)
    assert wide.code == 1, wide.err
    differences = result["differences"]
    assert [line for line in differences if says in line], differences


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kills=0"], "--kills is 0; give at least 1"),
        (["--workload=nothing"], "unknown workload 'nothing'"),
        (["--override=epoch=1"], "no field 'epoch'"),
        (["--num-processes=two"], "--num-processes is 'two'; give numbers, such as 1 or 1,2"),
        (["--num-processes=0,1"], "--num-processes is '0,1'; give numbers of at least 1"),
        (["--checkpoint-interval=5steps,1hour"], "'1hour' cannot be read"),
        (["--out=training"], "training is not empty; use a new folder"),
    ],
)
def test_fails_for_a_mistake_in_one_sentence(
    arguments: list[str],
    says: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["torture", *arguments]) == 2
    said = capfd.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_a_machine_has_no_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    given = argparse.Namespace(num_processes=None, workload=torture_command._BUILT_IN)
    assert [size.ranks for size in torture_command._sizes(given)] == [1, 2]
    given.num_processes = "1,4x3"
    with pytest.raises(UserError, match="'1,4x3'; each rank needs a GPU, and there are 2"):
        torture_command._sizes(given)


def test_fails_for_a_workload_that_fails_without_kills() -> None:
    done = command(["torture", "--override=drop_last=True", "--override=global_batch=4096"])
    assert done.code == 2
    assert "fails even without kills (exit code 2): error: " in done.err
    assert "Traceback" not in done.err
