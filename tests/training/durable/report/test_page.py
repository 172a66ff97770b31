"""Report, TensorBoard and receipt: what they say is what happened to the run."""

import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training import hooks, tiny
from tests.training.hooks import interrupt_at
from tests.training.runs import Run
from training.cli.main import main
from training.durable.record.history import History
from training.durable.record.run import RunConfig
from training.durable.report.page import _good, write_report
from training.durable.store.folder import FolderStore

_MADE: list[Run] = []


@pytest.fixture
def interrupted(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Killed in step 11 (so steps are repeated), given a notice in step 17, then finished.

    Once for all tests, but within one of them: the hooks are there.
    """
    if _MADE:
        return _MADE[0]
    root = tmp_path_factory.mktemp("interrupted")
    run = Run(dataset=dataset, uri=str(root / "run-1"), scratch=root / "scratch")

    def kill(step: int) -> None:
        if step == 10:
            signal.raise_signal(signal.SIGKILL)

    def tell(step: int) -> None:
        if step == 4:
            hooks.notice()

    for stage, hook, code in (("first", kill, -9), ("second", tell, 75)):
        tiny.HOOKS[stage] = hook
        process = run.fork("--override=step_seconds=0.01")
        process.join(120)
        assert process.exitcode == code
        tiny.HOOKS.clear()
    run.options = ["--override=step_seconds=0.01"]
    assert run.attempt() == 0
    _MADE.append(run)
    return run


def test_a_report_never_replaces_one_that_is_newer_than_what_it_shows(whole: Run) -> None:
    class Interrupted(FolderStore):
        """Another process writes its report while this one reads what happened."""

        def sizes(self, prefix: str) -> dict[str, int]:
            FolderStore(Path(self.uri)).put("report.html", b"newer")
            return super().sizes(prefix)

    config = RunConfig.read(whole.store)
    assert config is not None
    page = (Path(whole.uri) / "report.html").read_bytes()
    write_report(Interrupted(Path(whole.uri)), config, whole.head)
    assert (Path(whole.uri) / "report.html").read_bytes() == b"newer"
    whole.store.put("report.html", page)


def test_whether_it_is_good_says_the_share_that_is_right_before_a_loss() -> None:
    """A workload of one's own evaluates its loss first, then what its `loss` counts."""
    last = {"base": {"loss": 2.0, "accuracy": 0.25}, "tell": {"loss": 0.77, "accuracy": 0.9}}
    history: Any = SimpleNamespace(
        evaluations=lambda: {stage: [{"metrics": metrics}] for stage, metrics in last.items()},
        lines=[{"kind": "start", "facts": {"chance": 0.5}}],
    )
    assert _good(history) == "accuracy of tell 0.9; base 0.25; chance 0.5"
    last = {"tell": {"loss": 0.77, "perplexity": 2.2}}
    assert _good(history) == "loss of tell 0.77"


def test_the_history_says_what_happened(interrupted: Run) -> None:
    history = History.read(interrupted.store)
    first, second, third = history.attempts
    assert [a.ended for a in history.attempts] == ["silent", "released", "finished"]
    assert (first.first_step, second.cause, third.last_step) == (1, "notice", 24)
    assert second.seconds_to_commit is not None
    # The last commit before the kill was after step 9; what of 10 was written counts as lost.
    assert second.first_step is not None
    assert first.last_step is not None
    assert first.num_repeated == first.last_step - second.first_step + 1
    assert (second.num_repeated, third.num_repeated) == (0, 0)
    assert history.steps["step"].tolist() == list(range(1, 25))


def test_every_run_ends_with_a_report(interrupted: Run) -> None:
    page = interrupted.page
    assert "finished: 24 steps in 3 attempts." in page
    assert "released (notice)" in page
    # Every second of its three attempts has one cause.
    bought = interrupted.json("receipt.json")["goodput"]
    attempts = History.read(interrupted.store).attempts
    assert sum(bought["seconds"].values()) == pytest.approx(sum(a.seconds for a in attempts))
    assert 0 < bought["goodput"] < 1
    assert {"useful", "evaluation", "restore", "saving"} <= set(bought["seconds"])
    assert [each["why"] for each in bought["ends"]] == ["unknown", "market", "over"]
    # The causes besides the useful steps, and the attempt that was killed.
    assert page.count('<i class="lost"') == len(bought["seconds"]) - 1 + 1
    assert interrupted.head.weights_sha256 in page
    assert 'src="data:image/svg+xml;base64,' in page
    assert '<a href="evaluation/second-12/parts.json">' in page
    stages = interrupted.json("receipt.json")["stages"]
    accuracies = "".join(f"<td>{of['accuracy']:.4g}</td>" for of in stages.values())
    assert "<th>first</th><th>second</th>" in page
    assert f"<tr><td>accuracy</td>{accuracies}</tr>" in page
    # What a reader asks first is answered first, in this order.
    answers = re.findall(
        r"<td>(?:what|is|did) [\w ]+</td><td>(.+?)</td>", page.partition("<h2>")[0]
    )
    assert answers[0].startswith("tests.training.tiny")
    assert len(answers) == 5
    good = {stage: f"{of['accuracy']:.4g}" for stage, of in stages.items()}
    assert answers[1] == f"accuracy of second {good['second']}; first {good['first']}"
    assert answers[2] == "finished: 24 steps in 3 attempts."
    assert answers[4].endswith(" steps were computed twice.")
    assert page.count('<div class="chart">') == page.count('<script type="application/json">') > 0


def test_the_report_command_counts_dollars(
    interrupted: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    command = ["report", f"--run-uri={interrupted.uri}", f"--out={out}"]
    assert main([*command, "--usd-per-hour=3600"]) == 0
    said = capsys.readouterr().out
    bought = interrupted.json("receipt.json")["goodput"]
    seconds = sum(bought["seconds"].values())
    # A second is a dollar. What the receipt has is older by the seconds that it took to write.
    (dollars,) = re.findall(r"\$([\d.]+) for \d+ s of machines", said)
    assert seconds <= float(dollars) + 0.01 <= seconds + 5
    assert f"${dollars} for" in out.read_text()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["attempts"], found["steps"], found["state"]) == (3, 24, "finished")


def test_event_files_show_each_step_once(interrupted: Run, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "logs"
    for _ in range(2):  # the second call replaces what the first wrote
        assert main(["tensorboard", f"--run-uri={interrupted.uri}", f"--out={out}"]) == 0
    events = EventAccumulator(str(out))
    events.Reload()
    steps = [event.step for event in events.Scalars("first/loss")]
    assert steps == list(range(1, 13))
    lineage = interrupted.lineage()
    for event in events.Scalars("second/loss"):
        assert event.value == pytest.approx(lineage[event.step]["loss"])
    accuracy = events.Scalars("second/validation/accuracy")[-1].value
    receipt = interrupted.json("receipt.json")
    assert accuracy == pytest.approx(receipt["stages"]["second"]["accuracy"])


def test_a_run_that_fails_after_it_wrote_its_receipt_has_that_of_the_failure(
    run: Run, whole: Run
) -> None:
    interrupt_at("first", 7)
    assert run.attempt() == 75
    # What an attempt leaves that is killed just before it marks the run finished.
    run.store.put("receipt.json", json.dumps(whole.json("receipt.json")).encode())
    assert main(["fail", f"--run-uri={run.uri}", "--reason=no restarts left"]) == 0
    receipt = run.json("receipt.json")
    assert receipt["state"] == "failed"
    assert receipt["reason"].startswith("no restarts left; take it back with: ")


def test_a_torn_receipt_is_passed_over_by_the_report_and_written_again_by_a_failure(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt_at("first", 7)
    assert run.attempt() == 75
    run.store.put("receipt.json", b'{"state": "fin')
    assert main(["report", f"--run-uri={run.uri}"]) == 0
    assert "receipt.json is damaged (14 bytes) and is passed over" in caplog.text
    assert main(["fail", f"--run-uri={run.uri}", "--reason=no restarts left"]) == 0
    assert run.json("receipt.json")["state"] == "failed"


def test_a_failed_run_leaves_receipt_and_report(run: Run) -> None:
    run.options = ["--override=nan_at_step=5"]
    assert run.attempt() == 1
    receipt = run.json("receipt.json")
    assert receipt["state"] == "failed"
    assert "the loss is nan" in receipt["reason"]
    assert (receipt["steps"], receipt["committed_steps"]) == (5, 3)
    assert "It failed: stage" in run.page


def test_a_run_that_is_marked_failed_leaves_them_too(run: Run) -> None:
    run.options = ["--notice-budget-seconds=20"]
    tiny.HOOKS["first"] = lambda step: hooks.notice()
    assert run.attempt() == 75
    assert run.store.get("receipt.json") is None
    assert main(["fail", f"--run-uri={run.uri}", "--reason=restarts used up"]) == 0
    assert run.json("receipt.json")["reason"].startswith("restarts used up; take it back with: ")


def test_fails_for_a_folder_with_other_things_in_it(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["tensorboard", f"--run-uri={whole.uri}", f"--out={tmp_path}"]) == 2
    assert "has files that this command did not make" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").exists()


def test_fails_where_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"--run-uri={tmp_path / 'none'}"]) == 2
    assert "no run found at" in capsys.readouterr().err
