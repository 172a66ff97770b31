"""What a stage's code chooses by machine is kept over interruptions, or known to have changed."""

from collections.abc import Callable, Mapping

import pytest
import torch

from tests.training import outspoken
from tests.training.hooks import interrupt_at
from tests.training.runs import Run
from training.cli.main import main

Choose = Callable[[Mapping[str, str]], Mapping[str, str]]
SHORT = [outspoken.WORKLOAD, "--override=epochs=1"]


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Choose], None]:
    """Let the stages choose like that from now on, as on another machine."""

    def choosing(choose: Choose) -> None:
        outspoken.GIVEN.clear()
        monkeypatch.setattr(outspoken, "CHOOSE", [choose])

    return choosing


def interrupt_second(run: Run) -> None:
    interrupt_at("second", 1)
    assert run.attempt() == 75


def test_a_choice_is_given_back_to_the_stage_that_made_it(
    run: Run, choosing: Callable[[Choose], None]
) -> None:
    run.options = [*SHORT]
    choosing(lambda before: before or {"kernel": "fast"})
    interrupt_second(run)
    # As if another kernel were faster today.
    choosing(lambda before: before or {"kernel": "slow"})
    assert run.attempt() == 0
    assert outspoken.GIVEN == [("second", {"kernel": "fast"})]
    receipt = run.json("receipt.json")
    fast = {"kernel": "fast"}
    assert receipt["numerics_key"]["chosen"] == {"first": fast, "second": fast}
    assert receipt["numerics_changed"] == []


def test_a_choice_that_a_machine_cannot_keep_changes_the_numerics_key(
    run: Run, choosing: Callable[[Choose], None]
) -> None:
    run.options = [*SHORT]
    choosing(lambda before: {"kernel": "fast", "layout": "rows"})
    interrupt_second(run)
    choosing(lambda before: {"kernel": "plain", "layout": "rows"})
    assert run.attempt() == 0
    receipt = run.json("receipt.json")
    assert receipt["numerics_key"]["chosen"]["second"] == {"kernel": "fast", "layout": "rows"}
    assert receipt["numerics_changed"] == ["second.kernel"]
    starts = [(line["stage"], line["numerics"]["kernel"]) for line in run.lines("start")]
    assert starts == [("first", "fast"), ("second", "fast"), ("second", "plain")]


def test_evaluate_lets_the_stage_choose_too(run: Run, choosing: Callable[[Choose], None]) -> None:
    run.options = [*SHORT]
    choosing(lambda before: {"kernel": "fast"})
    assert run.attempt() == 0
    outspoken.GIVEN.clear()
    assert main(["evaluate", f"--run-uri={run.uri}", f"--dataset-uri={run.dataset}"]) == 0
    assert outspoken.GIVEN == [("second", {})]


def test_the_compiled_code_that_an_older_bundle_kept_is_left_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"artifacts/{'0' * 32}/compiled.bin"
    run.store.put(key, b"code")
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    run.options = ["--override=compile_mode=default", "--override=epochs=1"]
    assert run.attempt() == 0
    assert {name for name in run.store.sizes("") if name.endswith("compiled.bin")} == {key}


def test_fails_for_what_cannot_be_compared(
    run: Run, choosing: Callable[[Choose], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run.options = [*SHORT]
    choosing(lambda before: {"kernel": 3})  # type: ignore[dict-item]
    assert run.attempt() == 2
    said = capsys.readouterr().err
    assert "stage 'first': numerics returned a int as 'kernel'; return strings" in said
