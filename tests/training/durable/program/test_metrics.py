"""What a program reports of itself is read as its libraries really write it."""

import io
import itertools
import math
import os
import struct
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.durable.program import event_file, metrics
from training.durable.program.event_file import MetricRow, _masked_crc
from training.durable.program.metrics import MetricReader


def _reader(*folders: Path, definitions: tuple[tuple[str, str], ...] = ()) -> MetricReader:
    return MetricReader(definitions=definitions, folders=folders)


def _triples(rows: list[MetricRow]) -> list[tuple[int | None, str, float]]:
    return [(row.step, row.name, row.value) for row in rows]


def _feed(reader: MetricReader, output: bytes) -> None:
    reader.read_lines(output.replace(b"\r", b"\n").split(b"\n"))


def _everything(reader: MetricReader) -> list[tuple[int | None, str, float]]:
    return _triples(reader.poll(math.inf))


def test_metric_definitions_find_values_and_their_step_in_the_log() -> None:
    reader = _reader(
        definitions=(
            ("step", r"step (\d+)"),
            ("loss", r"loss=([-+.\deE]+|nan)"),
            ("accuracy", "accuracy: ([0-9.]+)"),
        )
    )
    _feed(reader, b"step 10 loss=0.5\nsaved\n  accuracy: 0.75")
    assert _triples(reader.poll()) == [(10, "loss", 0.5), (10, "accuracy", 0.75)]
    _feed(reader, b"step 11 loss=1e-3\rstep 12 loss=nan")
    rows = reader.poll()
    assert _triples(rows)[0] == (11, "loss", 0.001)
    assert rows[1].step == 12 and math.isnan(rows[1].value)
    _feed(reader, b"loss=7")
    assert _everything(reader) == [(12, "loss", 7.0)]


def test_a_log_of_junk_costs_no_memory_and_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_ROWS", 1000)
    reader = _reader(definitions=(("loss", "loss=(.*)"),))
    _feed(reader, b"\xff\x00\xfe loss=\xff\n" + b"loss=1" * 10_000 + b"\nloss=2\n")
    assert _everything(reader) == [(None, "loss", 2.0)]
    for _ in range(3):
        _feed(reader, b"loss=1\n" * 400)
    assert len(reader.poll()) == 1000


def test_prints_of_the_hugging_face_trainer_get_the_step_of_its_progress_bar() -> None:
    from transformers import TrainerControl, TrainerState
    from transformers.trainer_callback import ProgressCallback

    output = io.StringIO()
    progress: Any = ProgressCallback()
    with warnings.catch_warnings(), redirect_stdout(output), redirect_stderr(output):
        warnings.simplefilter("ignore")
        state, control = TrainerState(max_steps=40), TrainerControl()
        progress.on_train_begin(None, state, control)
        for state.global_step in (10, 20):
            progress.on_step_end(None, state, control)
            logs = {"loss": 5.0 / state.global_step, "learning_rate": 2e-05, "epoch": 0.5}
            progress.on_log(None, state, control, logs=logs)
        # An evaluation shows a bar of its own until it has printed.
        for _ in range(7):
            progress.on_prediction_step(None, state, control, eval_dataloader=range(7))
        progress.on_log(None, state, control, logs={"eval_loss": math.nan, "epoch": 1})
        progress.on_evaluate(None, state, control)
        progress.on_train_end(None, state, control)
    reader = _reader()
    _feed(reader, output.getvalue().encode())
    rows = _everything(reader)
    assert [row for row in rows if row[1] in ("loss", "learning_rate")] == [
        (10, "loss", 0.5),
        (10, "learning_rate", 2e-05),
        (20, "loss", 0.25),
        (20, "learning_rate", 2e-05),
    ]
    assert [step for step, name, _ in rows if name == "eval_loss"] == [20]


def test_prints_of_an_older_trainer_without_a_bar_have_no_step() -> None:
    reader = _reader()
    _feed(reader, b"{'loss': 0.7, 'epoch': 1.0}\n{'loss': nan, 'model': 'x'}\n{'not': closed\n")
    rows = _everything(reader)
    assert rows[:2] == [(None, "loss", 0.7), (None, "epoch", 1.0)]
    assert len(rows) == 3 and math.isnan(rows[2][2])


def test_bars_of_lightning_have_the_numbers_that_they_were_redrawn_with_last() -> None:
    """As lightning.pytorch's TQDMProgressBar draws them: first the step, then its numbers."""
    from tqdm import tqdm

    output = io.StringIO()
    for epoch in range(2):
        with tqdm(desc=f"Epoch {epoch}", total=4, file=output, mininterval=0) as bar:
            for batch in range(1, 5):
                bar.n = batch
                bar.refresh()
                bar.set_postfix({"v_num": 3, "train_loss": f"{1 / (4 * epoch + batch):.3f}"})
        print("`Trainer.fit` stopped", file=output)
    reader = _reader()
    _feed(reader, output.getvalue().encode())
    assert _everything(reader) == [(step, "train_loss", round(1 / step, 3)) for step in range(1, 9)]


def test_prints_of_nano_gpt_are_understood() -> None:
    reader = _reader()
    _feed(
        reader,
        b"step 0: train loss 4.2874, val loss 4.2823\n"
        b"iter 0: loss 4.2664, time 28023.71ms, mfu -100.00%\n"
        b"saving checkpoint to out\n"
        b"iter 1631: loss 4.0863, time 561.94ms\niter 1632: loss nan, time 563.15ms\n",
    )
    *rows, last = _everything(reader)
    assert rows == [
        (0, "train_loss", 4.2874),
        (0, "val_loss", 4.2823),
        (0, "loss", 4.2664),
        (1631, "loss", 4.0863),
    ]
    assert last[:2] == (1632, "loss") and math.isnan(last[2])


@pytest.mark.parametrize(
    "line",
    [
        "iter 10: loss is falling",
        "restored iter 10: loss 3.1, time 2ms",
        "iter 10: loss 3.1 of 7",
        "step 3: train loss 4.0, val loss 4.0 (best)",
        "Epoch 0:  50%|#####     | 5/10 files [loss=1]",
        "Epoch 1: loss=0.5",
        "Epoch 0:  22%|##  | 4/18 [00:17<01:02,  4.47s/it, v_num=193315]",
        "Validation DataLoader 0:  50%|#####     | 1/2 [00:00<00:00, 9.00it/s, val_loss=0.1]",
        "Epoch 0:  50%|#####     | 5/10 [00:01<00:01, 4.00it/s, name=best, lr=x1]",
    ],
)
def test_an_ordinary_line_is_not_a_metric(line: str) -> None:
    reader = _reader()
    _feed(reader, line.encode())
    assert _everything(reader) == []


def test_event_files_are_read_while_they_grow(tmp_path: Path) -> None:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    reader = _reader(tmp_path)
    writer = SummaryWriter(str(tmp_path / "runs" / "first"))
    writer.add_scalar("train/loss", 0.5, 1)
    writer.flush()
    assert reader.poll() == [MetricRow(name="train/loss", value=0.5, step=1)]
    writer.add_scalar("train/loss", 0.25, 2)
    writer.add_scalar("new", 4.0, 2, new_style=True)
    writer.add_scalar("double", 3.0, 2, new_style=True, double_precision=True)
    writer.add_histogram("large", torch.arange(9.0), 2)
    writer.add_text("words", "none", 2)
    writer.add_scalar("train/loss", math.inf, 3)
    writer.close()
    assert _everything(reader) == [
        (2, "train/loss", 0.25),
        (2, "new", 4.0),
        (2, "double", 3.0),
        (3, "train/loss", math.inf),
    ]


def test_every_cut_and_every_flipped_byte_of_an_event_file_is_survived(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "whole")) as writer:
        for step in range(3):
            writer.add_scalar("loss", step, step)
    data = next((tmp_path / "whole").iterdir()).read_bytes()
    whole = [(0, "loss", 0.0), (1, "loss", 1.0), (2, "loss", 2.0)]
    folder = tmp_path / "cut"
    folder.mkdir()
    reader, found = _reader(folder), []
    for end in range(len(data) + 1):
        (folder / "events.tfevents").write_bytes(data[:end])
        found += _triples(reader._read_files())
    assert found == whole
    version = 16 + int.from_bytes(data[:8], "little")  # bytes of the first record, without scalars
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        (folder / "events.tfevents").write_bytes(flipped)
        rows = _everything(_reader(folder))
        assert set(rows) < set(whole) or (at < version and rows == whole)


def test_json_lines_of_two_writers_with_junk_between_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = _reader(tmp_path)
    path.write_text('{"step": 1, "loss": 0.5, "name": "a", "done": true}\n{"step": 2, "lo')
    assert _triples(reader.poll()) == [(1, "loss", 0.5)]
    with path.open("ab") as file:
        file.write(b'ss": NaN}\n\xff\x00\n[1]\n"x"\n' + b"[" * 5000 + b"\n")
        file.write(b'{"global_step": 3, "loss": "0.25", "time": 7}\n')
    rows = reader.poll(math.inf)
    assert [(row.step, row.name) for row in rows] == [(2, "loss"), (3, "loss")]
    assert math.isnan(rows[0].value)
    path.write_text('{"step": 9, "loss": 0.125, "note": "written anew, and longer than before"}\n')
    assert _everything(reader) == [(9, "loss", 0.125)]


def _event(step: int) -> bytes:
    """As TensorBoard writes `loss` at a step below 128."""
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 0.5)
    summary = bytes([0x0A, len(value)]) + value
    event = bytes([0x10, step, 0x2A, len(summary)]) + summary
    size = struct.pack("<Q", len(event))
    crcs = [struct.pack("<I", _masked_crc(data)) for data in (size, event)]
    return size + crcs[0] + event + crcs[1]


_FILES: dict[str, tuple[bytes, Callable[[int], bytes]]] = {
    "events.tfevents": (b"", _event),
    "metrics.jsonl": (b"", lambda step: b'{"step": %d, "loss": 0.5}\n' % step),
    "metrics.csv": (b"step,loss\n", lambda step: b"%d,0.5\n" % step),
}


@pytest.mark.parametrize("name", _FILES)
def test_what_earlier_attempts_have_reported_is_not_even_parsed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes of curves took longer than the watchdog's limit, on each machine again."""
    path, (head, line) = tmp_path / name, _FILES[name]
    path.write_bytes(head + b"".join(map(line, range(100))))
    reader = _reader(tmp_path)
    with monkeypatch.context() as patched:
        for module, parse in ((metrics, "_rows"), (event_file, "_scalars")):
            patched.setattr(module, parse, None)
        reader.skip_history()
    assert reader.poll() == []
    with path.open("ab") as file:
        file.write(line(100))
    assert _everything(reader) == [(100, "loss", 0.5)]
    if name == "metrics.csv":
        path.write_text("step,loss,lr\n" + "".join(f"{step},0.5,\n" for step in range(102)))
        assert _everything(reader) == [(101, "loss", 0.5)], "written anew, with a column more"


@pytest.mark.parametrize("name", _FILES)
def test_a_backlog_is_read_as_long_as_it_may_take(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read before the last snapshot, and took longer than a notice leaves."""
    head, line = _FILES[name]
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(head + b"".join(map(line, range(100))))
    monkeypatch.setattr(metrics, "_MAX_READ_BYTES", 200)
    monkeypatch.setattr(event_file, "_MAX_READ_BYTES", 200)
    reader, clock = _reader(tmp_path), itertools.count()
    with monkeypatch.context() as patched:
        patched.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        first = _triples(reader.poll(3.0))
    assert {step for step, _, _ in first} < {*range(50)}, "two files of three, a part of them"
    assert reader.has_more
    whole = first + _everything(reader)
    assert sorted(whole) == sorted([(step, "loss", 0.5) for step in range(100)] * 3)


def test_looking_for_files_takes_a_fiftieth_of_the_time(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / str(number)).touch()
    reader = _reader(tmp_path)
    reader.poll()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    assert reader.poll() == [], "it looked again at once"
    assert _everything(reader) == [(1, "loss", 1.0)]


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.tfevents").symlink_to("missing")
    os.mkfifo(tmp_path / "b.tfevents")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    assert _everything(_reader(tmp_path)) == [(1, "loss", 1.0)]


@pytest.mark.slow  # it imports Lightning: 6 s
def test_the_loggers_of_lightning_are_read_as_they_write(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    reader = _reader(tmp_path)
    for logger in (CSVLogger(tmp_path), TensorBoardLogger(tmp_path, name="tb")):
        logger.log_metrics({"loss": 0.5}, step=1)
        logger.save()
        assert (1, "loss", 0.5) in _everything(reader)
        logger.log_metrics({"loss": 0.25}, step=2)
        logger.log_metrics({"validation_loss": 0.75, "epoch": 0}, step=2)
        logger.save()
        logger.finalize("success")
        rows = [row for row in _everything(reader) if "loss" in row[1]]
        assert rows == [(2, "loss", 0.25), (2, "validation_loss", 0.75)]


def test_a_csv_that_is_written_from_an_empty_history_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = [f"{step},0.5\n" for step in range(200_000)]
    path.write_text("step,loss\n" + "".join(rows))
    reader = _reader(tmp_path)
    assert len(_everything(reader)) == len(rows)
    path.write_text("step,loss,lr\n" + "".join(row.replace("\n", ",1\n") for row in rows))
    assert _everything(reader) == [], "a column more, in more than one read"
    path.write_text("step,loss\n7,0.5\n")
    assert _everything(reader) == _everything(reader) == []
    with path.open("a") as file:
        file.write("8,0.25\n")
    assert _everything(reader) == [(8, "loss", 0.25)]


@pytest.mark.slow  # it imports Lightning: 6 s
def test_a_csv_logger_that_begins_anew_in_its_folder_is_read_on(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    reader, found = _reader(tmp_path), list[tuple[int | None, str, float]]()
    for first in (0, 30):
        with warnings.catch_warnings(action="ignore"):  # that what was there will be deleted
            logger = CSVLogger(tmp_path, name="", version="")
            assert logger.experiment
        for step in range(first, first + 40):
            logger.log_metrics({"loss": 0.5, f"loss_{step // 10}": 0.5}, step=step)
            logger.save()
            found += [row for row in _everything(reader) if row[1] == "loss"]
    steps = [row[0] for row in found]
    assert steps[:40] == [*range(40)]
    assert steps[40:] == [*range(32, 70)], "its first two tell that it has begun anew"


def test_a_line_that_is_no_csv_hides_no_later_one(tmp_path: Path) -> None:
    """As a sample's text with a quote in it: on each machine the attempt ended with an error."""
    path, junk = tmp_path / "metrics.csv", '0,"' + "x" * 200_000 + "\n"
    path.write_text("step,loss\n" + junk)
    reader = _reader(tmp_path)
    assert _everything(reader) == []
    with path.open("a") as file:
        file.write("1,0.5\n")
    assert _everything(reader) == [(1, "loss", 0.5)]


def test_a_csv_that_is_being_rewritten_is_not_reported_again(tmp_path: Path) -> None:
    """Pandas and Lightning truncate it, and a look may come between two of their writes."""
    path = tmp_path / "metrics.csv"
    rows = [f"{step},0.5\n" for step in range(40)]
    path.write_text("".join(["step,loss\n", *rows]))
    reader = _reader(tmp_path)
    assert len(_everything(reader)) == 40
    path.write_text("".join(["step,loss\n", *rows[:20]]))
    assert reader.poll() == []
    path.write_text("".join(["step,loss\n", *rows, "40,0.5\n"]))
    assert _everything(reader) == [(40, "loss", 0.5)]
