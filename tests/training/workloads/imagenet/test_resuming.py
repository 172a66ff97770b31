"""An import of images that was interrupted goes on: nothing finished is done twice."""

import os
from pathlib import Path

import pytest

from contract.keys import UNFINISHED
from tests.training.workloads.imagenet.photographs import command, content, fill, photograph
from training.cli.main import main
from training.durable.dataset_output import FolderOutput
from training.durable.sources import SourceFile
from training.workloads.imagenet import packing


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests need no other processes."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


def test_an_import_that_was_stopped_packs_nothing_twice_and_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = fill(tmp_path / "own", 24), tmp_path / "one/out"
    assert main(command(source, tmp_path / "whole/out")) == 0
    write, written = packing.write_shard, list[str]()

    def stop_at_the_seventh(path: Path, *rest: object) -> object:
        written.append(path.name)
        if len(written) == 7:
            path.write_bytes(b"half a shard")
            raise KeyboardInterrupt
        return write(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(packing, "write_shard", stop_at_the_seventh)
    assert main(command(source, out)) == 130
    assert (out / UNFINISHED).is_file()
    capsys.readouterr()
    assert main(command(source, out)) == 0
    said = capsys.readouterr().out
    assert f"resuming the unfinished dataset in {out}" in said
    assert "packing 48 files: 48/48" in said
    # The seventh was in flight.
    assert len(written) == 17
    assert len(set(written)) == 16
    assert content(out) == content(tmp_path / "whole/out")


def test_an_import_that_was_killed_before_its_last_write_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    source, out = fill(tmp_path / "own", 9), tmp_path / "one/out"
    assert main(command(source, tmp_path / "whole/out")) == 0
    with monkeypatch.context() as patched:
        patched.setattr(FolderOutput, "clean_up", stop)
        assert main(command(source, out)) == 130
    assert main(command(source, out, f"--dataset-uri={tmp_path / 'store'}")) == 0
    assert content(out) == content(tmp_path / "whole/out") == content(tmp_path / "store")


def test_an_import_that_was_killed_at_its_beginning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = fill(tmp_path / "own", 9), tmp_path / "out"
    write, names = FolderOutput.write, list[str]()

    def stop_at_each(self: FolderOutput, name: str, data: bytes) -> None:
        if name not in names and len(names) < 3:
            names.append(name)
            (out / f"{name}.part").parent.mkdir(exist_ok=True)
            (out / f"{name}.part").write_bytes(data[:9])
            raise KeyboardInterrupt
        write(self, name, data)

    monkeypatch.setattr(FolderOutput, "write", stop_at_each)
    codes = [main(command(source, out)) for _ in range(4)]
    assert codes == [130, 130, 130, 0]
    assert names[:2] == [UNFINISHED, ".packed/source.z"]
    assert not [path for path in out.rglob("*") if path.name.endswith(".part")]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("", ["--override=quality=80"], "with quality 90, not 80; continue with that"),
        ("", ["--seed=1"], "with seed 0, not 1; continue with that"),
        ("train/cats/0.jpg", [], " cats train train/cats/0.jpg' is not in both (bytes, class, spl"),
        ("train/new/7.jpg", [], " new train train/new/7.jpg' is not in both (bytes"),
    ],
)
def test_fails_to_go_on_with_another_source_or_option(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    options: list[str],
    message: str,
) -> None:
    source, out = fill(tmp_path / "own", 9), tmp_path / "out"
    for name in ("val/cats/0.jpg", "val/dogs/1.jpg"):
        (source / name).write_bytes(b"no image")
    assert main(command(source, out)) == 2
    if change:
        (source / change).parent.mkdir(exist_ok=True)
        (source / change).write_bytes(photograph(99))
    capsys.readouterr()
    assert main(command(source, out, *options)) == 2
    said = capsys.readouterr().err
    assert f"{out} has an unfinished dataset" in said
    assert message in said


def test_what_was_uploaded_is_not_packed_again_unless_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, uri = fill(tmp_path / "own", 12), str(tmp_path / "store")
    straight = ["data", "import", str(source), "--workload=imagenet", f"--dataset-uri={uri}"]
    packs, write = list[str](), packing.write_shard

    def stop_at_the_sixth(path: Path, *rest: object) -> object:
        packs.append(path.name)
        if len(packs) == 6:
            raise KeyboardInterrupt
        return write(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(packing, "write_shard", stop_at_the_sixth)
    assert main(straight) == 130
    (tmp_path / "store" / packs[0]).unlink()
    assert main(straight) == 0
    assert sorted({name for name in packs if packs.count(name) == 2}) == sorted(
        [packs[0], packs[5]]
    )


def test_fails_for_a_source_that_cannot_be_read_and_goes_on_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while only some are read, to know how many fill a shard."""
    source, out = fill(tmp_path / "own", 9), tmp_path / "out"
    read = SourceFile.read

    def fail(self: SourceFile) -> bytes:
        if self.name == "train/dogs/4.jpg":
            raise OSError(5, "Input/output error")
        return read(self)

    with monkeypatch.context() as patched:
        patched.setattr(SourceFile, "read", fail)
        assert main(command(source, out)) == 2
    assert (
        "train/dogs/4.jpg cannot be read: Input/output error; give the" in capsys.readouterr().err
    )
    assert main(command(source, out)) == 0


def test_fails_while_another_import_is_at_work_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    source, out = fill(tmp_path / "own", 9), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(packing, "write_shard", stop)
        assert main(command(source, out)) == 130
    with FolderOutput(out).working_folder():
        assert main(command(source, out)) == 2
    assert f"another import is running in {out}; wait for it to end" in capsys.readouterr().err
    assert main(command(source, out)) == 0
