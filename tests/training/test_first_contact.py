"""Photographs and text of one's own, as somebody brings them who has only read the documentation.

From the import by the commands that it prints to a checkpoint, a kill, and the end of the run; and
what is wrong is refused in one sentence.
"""

import json
import multiprocessing
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from tests.training.runs import wait_for
from training.cli.main import main

# All overrides are for speed: what the dataset needs, the run takes from it.
FAST = {
    "imagenet": "epochs=6 train_size=32 eval_size=32 low_until_epoch=0 train_size_from_epoch=0",
    "growth": "dense_steps=6 experts_steps=3 grown_steps=3 context=32 num_shown=1 sample_tokens=2",
}


def photographs(folder: Path, count: int = 30, classes: Sequence[str] = ("barn", "boat")) -> Path:
    """As a camera and a file manager leave them: JPEGs, a PNG, a turned one, and other files."""
    for number in range(count):
        kind = classes[number % len(classes)]
        image = Image.new("RGB", (90 + number, 60), (200, 120 + 2 * number, 40))
        corners = [(20, 50), (60, 50), (40, 20 if kind == "barn" else 45)]
        ImageDraw.Draw(image).polygon(corners, fill=(number, 60, 160))
        path = folder / kind / f"IMG_{number:04}.{'png' if number == 4 else 'JPG'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = 6 if number == 5 else 1
        image.save(path, exif=exif)
        (folder / kind / "Thumbs.db").write_bytes(b"\xd0\xcf")
    (folder / ".DS_Store").write_bytes(b"\x00")
    return folder


def corpus(folder: Path, count: int = 60) -> Path:
    """Chapters, each a file of its own; Windows' line ends, a byte order mark, umlauts."""
    folder.mkdir()
    for number in range(count):
        story = f"Chapter {number}.\r\nThe naïve boat {number % 7} sailed to Köln and back. " * 12
        mark = "\ufeff" if number == 3 else ""
        (folder / f"chapter {number:02}.txt").write_text(mark + story, "utf-8", newline="")
    return folder


@pytest.mark.parametrize(("workload", "bring"), [("imagenet", photographs), ("growth", corpus)])
def test_ones_own_files_are_trained_on_by_the_commands_that_the_import_prints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workload: str,
    bring: Callable[[Path], Path],
) -> None:
    """The run is killed after its first checkpoint; the same command goes on from there."""
    monkeypatch.chdir(tmp_path)
    bring(tmp_path / "mine")
    assert main(["data", "import", "mine", f"--workload={workload}", "--out=data"]) == 0
    said = capsys.readouterr().out
    assert "recipe laptop would be refused" not in said
    (command,) = [line for line in said.splitlines() if "-m training run" in line]
    words = [*shlex.split(command)[1:], "--checkpoint-interval=1steps", "--lease-ttl-seconds=3"]
    words += [f"--override={each}" for each in FAST[workload].split()]
    head = tmp_path / "runs/first/head.json"
    process = multiprocessing.get_context("fork").Process(target=main, args=(words[2:],))
    process.start()
    wait_for(lambda: head.is_file() and bool(json.loads(head.read_text())["checkpoints"]))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert main(words[2:]) == 0
    assert "[resume] from" in capsys.readouterr().out
    receipt = json.loads((tmp_path / "runs/first/receipt.json").read_text())
    assert receipt["state"] == "finished"
    assert (tmp_path / "runs/first/final/model.safetensors").is_file()


def empty_class(folder: Path) -> None:
    photographs(folder)
    (folder / "canoe").mkdir()


def class_of_other_files(folder: Path) -> None:
    photographs(folder)
    (folder / "canoe").mkdir()
    (folder / "canoe/notes.txt").write_text("to do")


def one_class(folder: Path) -> None:
    photographs(folder, classes=("barn",))


def untrained_class(folder: Path) -> None:
    photographs(folder / "train")
    photographs(folder / "val", classes=("barn", "boat", "canoe"))


def flat(folder: Path) -> None:
    for path in photographs(folder).glob("*/*.JPG"):
        path.rename(folder / path.name)


def broken(folder: Path, every: int = 1) -> None:
    for path in sorted(photographs(folder).glob("*/*.JPG"))[::every]:
        path.write_bytes(path.read_bytes()[:300])
    for path in folder.glob("*/*.png"):
        path.unlink()


def partly_broken(folder: Path) -> None:
    broken(folder, every=4)


@pytest.mark.parametrize(
    ("bring", "sentence"),
    [
        (empty_class, "mine/canoe is empty; add files, or delete it"),
        (class_of_other_files, "class 'canoe' has no images; add some, or delete its folder"),
        (one_class, "only the class 'barn' has images; lay two or more out as CLASS/FILE"),
        (untrained_class, "class 'canoe' of validation has no files in train; add some"),
        (flat, "IMG_0000.JPG is in no class; lay the files out as CLASS/FILE"),
        (broken, "29 of 29 files are not images, such as "),
        (partly_broken, "8 of 29 files are not images, such as "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fails_for_wrong_photographs_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bring: Callable[[Path], None],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    bring(tmp_path / "mine")
    words = ["data", "import", "mine", "--workload=imagenet", "--out=data"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sentence}") and said.count("\n") == 1
    assert not (tmp_path / "data/manifest.json").exists()
    if bring is broken:
        assert said.endswith("names them. Give images that Pillow can read\n")
    if bring is partly_broken:
        assert len(json.loads((tmp_path / "data/left_out.json").read_text())) == 8
        assert said.endswith("or allow more with --override left_out_share=0.28\n")
        assert main([*words, "--override=left_out_share=0.28"]) == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "the files have no text; give files with text"),
        ("Grüße".encode("latin-1"), "book.txt, line 1 has the byte 0xfc, which is not valid UTF-8"),
        (b"A book.\n\nIts second chapter.\n\n", "split validation got none of the 1 documents"),
        (b"One.<|endoftext|>Two.", "split validation got none of the 2 documents"),
    ],
    ids=["empty", "latin", "one document", "two documents"],
)
def test_fails_for_wrong_text_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, sentence: str
) -> None:
    """What is advised works, with the same folder."""
    source, out = tmp_path / "book.txt", tmp_path / "data"
    source.write_bytes(text)
    words = ["data", "import", str(source), "--workload=growth", f"--out={out}"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sentence}") and said.count("\n") == 1
    assert not out.exists() or not any(out.iterdir())
    if "none of" in sentence:
        several = b"\n\n".join(b"Paragraph %d of it." % number for number in range(40))
        source.write_bytes(several)
        assert r"(--override 'separator=\n\n')" in said
        assert main([*words, r"--override=separator=\n\n"]) == 0
    if "2 documents" in sentence:
        assert "hold out one of 2 with --override held_out_of=2" in said


def test_a_corpus_that_is_too_small_is_told_by_the_import_and_refused_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, run = tmp_path / "notes.txt", tmp_path / "data", tmp_path / "run"
    source.write_text("<|endoftext|>".join(f"Note {number}." for number in range(40)))
    assert main(["data", "import", str(source), "--workload=growth", f"--out={out}"]) == 0
    sentence = "split validation has 8 tokens, but a window takes 129; bring more text, or pass "
    sentence += "--override context=7 or less"
    said = capsys.readouterr().out
    assert "[warning] recipe laptop would be refused: " in said and sentence in said
    words = ["run", "--workload=growth", "--recipe=laptop", f"--dataset-uri={out}"]
    assert main([*words, f"--run-uri={run}"]) == 2
    assert sentence in capsys.readouterr().err
    assert not run.exists() or not any(run.iterdir())
