"""What a stage's code chooses by machine is kept over interruptions, or known to have changed."""

import signal
from collections.abc import Callable, Mapping

import pytest
from torch import nn

from tests.training import tiny
from tests.training.runs import Run
from training.cli.main import main
from training.workload import Inputs

Choose = Callable[[Mapping[str, str]], Mapping[str, str]]
# What each call was given: stage, what it started with.
GIVEN: list[tuple[str, dict[str, str]]] = []


def choosing(monkeypatch: pytest.MonkeyPatch, choose: Choose) -> None:
    """Let the stages of the tiny workload choose from now on, as on another machine."""

    def numerics(
        stage: tiny.TinyTrain, m: nn.Module, i: Inputs, started_with: Mapping[str, str]
    ) -> Mapping[str, str]:
        assert isinstance(m, nn.Sequential)
        GIVEN.append((stage.name, dict(started_with)))
        return choose(started_with)

    GIVEN.clear()
    monkeypatch.setattr(tiny.TinyTrain, "numerics", numerics, raising=False)


def interrupt_second(run: Run) -> None:
    tiny.HOOKS["second"] = lambda step: signal.raise_signal(signal.SIGUSR1) if step == 1 else None
    assert run.attempt() == 75
    tiny.HOOKS.clear()


def test_a_choice_is_given_back_to_the_stage_that_made_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.options = ["--override=epochs=1"]
    choosing(monkeypatch, lambda before: before or {"kernel": "fast"})
    interrupt_second(run)
    # As if another kernel were faster today.
    choosing(monkeypatch, lambda before: before or {"kernel": "slow"})
    assert run.attempt() == 0
    assert GIVEN == [("second", {"kernel": "fast"})]
    receipt = run.json("receipt.json")
    fast = {"kernel": "fast"}
    assert receipt["numerics_key"]["chosen"] == {"first": fast, "second": fast}
    assert receipt["numerics_changed"] == []


def test_a_choice_that_a_machine_cannot_keep_changes_the_numerics_key(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.options = ["--override=epochs=1"]
    choosing(monkeypatch, lambda before: {"kernel": "fast", "layout": "rows"})
    interrupt_second(run)
    choosing(monkeypatch, lambda before: {"kernel": "plain", "layout": "rows"})
    assert run.attempt() == 0
    receipt = run.json("receipt.json")
    assert receipt["numerics_key"]["chosen"]["second"] == {"kernel": "fast", "layout": "rows"}
    assert receipt["numerics_changed"] == ["second.kernel"]
    starts = [(line["stage"], line["numerics"]["kernel"]) for line in run.lines("start")]
    assert starts == [("first", "fast"), ("second", "fast"), ("second", "plain")]


def test_evaluate_lets_the_stage_choose_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.options = ["--override=epochs=1"]
    choosing(monkeypatch, lambda before: {"kernel": "fast"})
    assert run.attempt() == 0
    GIVEN.clear()
    assert main(["evaluate", f"--run-uri={run.uri}", f"--dataset-uri={run.dataset}"]) == 0
    assert GIVEN == [("second", {})]


def test_fails_for_what_cannot_be_compared(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choosing(monkeypatch, lambda before: {"kernel": 3})  # type: ignore[dict-item]
    assert run.attempt() == 2
    said = capsys.readouterr().err
    assert "stage 'first': numerics returned a int as 'kernel'; return strings" in said
