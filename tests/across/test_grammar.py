"""One table of texts through everything that reads them: trainer, boot, stacks, alarms and plan."""

from collections.abc import Callable
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.grammar import Interval, Span, parse_interval, parse_kept, parse_span
from contract.run_env import find_fault
from sizing.plan.size_plan import Plan, interval_seconds
from stacks.monitoring.alarms import commit_interval_seconds
from stacks.parameters import StackParameters
from tests.sizing.sample_plan import plan
from training.cli.main import main

INTERVALS = [
    ("auto", Interval(value=0, unit="auto")),
    ("2epochs", Interval(value=2, unit="epochs")),
    ("2epoch", Interval(value=2, unit="epochs")),
    ("100steps", Interval(value=100, unit="steps")),
    ("1step", Interval(value=1, unit="steps")),
    ("600s", Interval(value=600, unit="s")),
    ("0.5s", Interval(value=0.5, unit="s")),
    ("060s", Interval(value=60, unit="s")),
]
NO_INTERVALS = ["2", "epochs", "0steps", "-1s", "2 hours", "1.5epochs", "2epochss", "0.0s", "often"]
NO_INTERVALS += ["", "600", "1h", "autos"]
KEPT = [
    ("3", (3, None)),
    ("3,10epochs", (3, Span(value=10, unit="epochs"))),
    ("3,1epoch", (3, Span(value=1, unit="epochs"))),
    ("2,5000steps", (2, Span(value=5000, unit="steps"))),
    ("2,1step", (2, Span(value=1, unit="steps"))),
]
NOT_KEPT = ["", "0", "10epochs", "3,0epochs", "3,", "3,10s", "-1", "3, 2epochs", "all"]


def by_the_trainer(text: str, capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """What `run` says; the interval is read first, and a good one lets it refuse what to keep."""
    where = [f"--run-uri={folder / 'run'}", f"--dataset-uri={folder / 'data'}"]
    command = ["run", "--workload=trajectory", "--recipe=laptop", *where]
    with pytest.raises(SystemExit, match="2"):
        main([*command, f"--checkpoint-interval={text}", "--keep=all"])
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan(tmp_path_factory.mktemp("plan"))


# Of a plan, as the alarms take them.
FIGURES = {
    "epoch_seconds": 30.0,
    "stages": [{"seconds": 900.0}],
    "checkpoint_interval_seconds": 25.0,
}


def by_the_plan(planned: Plan, text: str) -> float | None:
    return interval_seconds(text, planned.work.main)


@pytest.mark.parametrize(("text", "interval"), INTERVALS)
def test_an_interval_is_accepted_everywhere(
    text: str,
    interval: Interval,
    planned: Plan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse_interval(text) == interval
    assert "to keep, 'all', cannot be read" in by_the_trainer(text, capsys, tmp_path)
    assert find_fault("TRAINER_OPTIONS", f'"checkpoint_interval={text}"') is None
    parameters = StackParameters.for_size("g5.xlarge", **{"train.checkpoint_interval": text})
    assert parameters.train == {"checkpoint_interval": text}
    apart = commit_interval_seconds(text, FIGURES)
    seconds = by_the_plan(planned, text)
    if interval.unit == "s":
        assert (apart, seconds) == (interval.value, max(1.0, interval.value))
    elif interval.unit == "epochs":
        assert apart == interval.value * 30
        assert seconds == pytest.approx(max(1.0, interval.value * planned.work.main.epoch_seconds))
    elif interval.unit == "steps":
        assert apart == FIGURES["checkpoint_interval_seconds"]
        assert seconds == pytest.approx(max(1.0, interval.value * planned.work.main.step.seconds))
    else:
        assert (apart, seconds) == (60, None)


@pytest.mark.parametrize("text", NO_INTERVALS)
def test_fails_in_one_sentence_everywhere(
    text: str, planned: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = (
        f"the checkpoint interval {text!r} cannot be read; write auto, 2epochs, 100steps or 600s"
    )
    assert sentence in by_the_trainer(text, capsys, tmp_path)
    reads: list[Callable[[], object]] = [
        lambda: parse_interval(text),
        lambda: StackParameters.for_size("g5.xlarge", **{"train.checkpoint_interval": text}),
        lambda: commit_interval_seconds(text, FIGURES),
        lambda: by_the_plan(planned, text),
    ]
    for read in reads:
        with pytest.raises(ValueError) as refusal:
            read()
        assert str(refusal.value).removeprefix("train.checkpoint_interval: ") == sentence
    if " " not in text:
        fault = find_fault("TRAINER_OPTIONS", f'"keep=3 checkpoint_interval={text}"')
        assert fault == f"TRAINER_OPTIONS: checkpoint_interval: {sentence}"


@pytest.mark.parametrize(("text", "kept"), KEPT)
def test_what_to_keep_is_accepted_everywhere(text: str, kept: tuple[int, Span | None]) -> None:
    assert parse_kept(text) == kept
    assert find_fault("TRAINER_OPTIONS", f'"keep={text}"') is None
    assert StackParameters.for_size("g5.xlarge", **{"train.keep": text}).train["keep"] == text


@pytest.mark.parametrize("text", NOT_KEPT)
def test_fails_for_what_cannot_be_kept(text: str) -> None:
    sentence = f"the checkpoints to keep, {text!r}, cannot be read; write 3, 3,10epochs or 3,5000"
    with pytest.raises(UserError) as refusal:
        parse_kept(text)
    assert str(refusal.value).startswith(sentence)
    with pytest.raises(ValueError) as refused:
        StackParameters.for_size("g5.xlarge", **{"train.keep": text})
    assert str(refused.value) == f"train.keep: {refusal.value}"


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("8epochs", Span(value=8, unit="epochs")),
        ("1epoch", Span(value=1, unit="epochs")),
        ("4000steps", Span(value=4000, unit="steps")),
        ("0steps", None),
        ("600s", None),
        ("forever", None),
        ("8 epochs", None),
    ],
)
def test_a_span_is_epochs_or_steps(text: str, span: Span | None) -> None:
    assert parse_span(text) == span
