"""Progress: what a person sees of it on a narrow terminal, and of files that are synced."""

import io

import pytest
from rich.console import Console

from training.cli.data import _RateBar
from training.durable.report import progress as module
from training.durable.report.progress import FileProgressBar, ProgressBar, _rich_progress


@pytest.mark.parametrize("width", [80, 120, 200])
def test_how_far_and_how_long_is_seen_however_narrow_the_terminal(width: int) -> None:
    progress = _rich_progress()
    text = "epoch 1/40 loss 2.8965 lr 5.00e-05 84 samples/s, 1% waiting for data, 0.0129 dollars"
    progress.add_task("time_average", total=12000, completed=1500, text=text)
    console = Console(file=io.StringIO(), width=width)
    console.print(progress.get_renderable())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "time_average ━" in shown
    assert " 1500/12000 -:--:-- epoch 1/40" in shown
    assert all(word in shown for word in text.split())


def test_a_sync_counts_its_own_files(capsys: pytest.CaptureFixture[str]) -> None:
    with FileProgressBar("dataset") as show:
        show(1, 3, 1_000_000)
        show(3, 3, 3_000_000)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("dataset: 1/3 files, 1.0 MB, ")
    assert last.startswith("dataset: 3/3 files, 3.0 MB, ")


def test_how_long_it_takes_is_said_once_that_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with ProgressBar("images", 100) as bar, _RateBar("packing") as packing:
        packing(0, 100)
        for now[0], done in ((0.5, 1), (8.5, 20)):
            bar.show(done, "")
            packing(done, 100)
    first, of_rate, then, later_rate = capsys.readouterr().out.splitlines()
    assert (first, of_rate) == ("images: 1/100 ", "packing: 1/100 2/s")
    assert then == "images: 20/100 , about 34 s left"
    assert later_rate == "packing: 20/100 2.4/s, about 34 s left"
