"""What a program prints is kept whole, and shown so that a journal can be read."""

import gzip
import io
import os
import sys
from pathlib import Path

import pytest

from contract.keys import LOGS
from training.durable.program.log import ProgramLog, _LineSplitter
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import StoreError


class Refusing(FolderStore):
    """Refuses its first writes."""

    refusals = 2

    def put(self, key: str, data: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreError("no answer")
        super().put(key, data)


def printed(log: ProgramLog, *pieces: bytes) -> None:
    """A program prints this and ends."""
    program = os.dup(log.output)
    log.start()
    for piece in pieces:
        os.write(program, piece)
    os.close(program)
    log.close(60)


def whole(store: FolderStore) -> bytes:
    parts = [store.get(key) for key in store.sizes(LOGS)]
    return b"".join(gzip.decompress(part.data) for part in parts if part)


def lines_of(*pieces: bytes) -> list[tuple[bytes, bool]]:
    found: list[tuple[bytes, bool]] = []
    splitter = _LineSplitter(
        lambda lines, is_redrawn: found.extend((line, is_redrawn) for line in lines)
    )
    for piece in pieces:
        splitter.feed(piece)
    splitter.end()
    return found


def test_lines_are_cut_where_they_end_however_they_arrive(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert lines_of(b"one\ntw", b"o\n", b"three") == [
        (b"one", False),
        (b"two", False),
        (b"three", False),
    ]
    assert capfd.readouterr().out == "one\ntwo\nthree\n"


def test_a_progress_bar_shows_one_state_now_and_then(capfd: pytest.CaptureFixture[str]) -> None:
    bar = [f"\r{n}%".encode() for n in range(100)]
    assert len(lines_of(*bar, b"\ndone\n")) == 102
    shown = capfd.readouterr().out.splitlines()
    assert shown[-2:] == ["99%", "done"]
    assert len(shown) <= 4


def test_a_windows_line_end_is_one_end_even_where_it_is_cut() -> None:
    assert lines_of(b"a\r", b"\nb\r\n") == [(b"a", False), (b"b", False)]


def test_a_line_of_megabytes_is_cut_for_who_reads_lines(capfd: pytest.CaptureFixture[str]) -> None:
    ((line, _),) = lines_of(*[b"x" * 1_000_000] * 3)
    assert len(line) < 20_000
    assert line.endswith(b"x ...")
    assert len(capfd.readouterr().out) < 20_000


def test_what_is_read_at_once_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[bytes]()
    monkeypatch.setattr("training.durable.program.log._show", shown.append)
    assert len(lines_of(b"line\n" * 10_000, b"the end")) == 10_001
    assert shown == [b"line\n" * 10_000, b"the end\n"]


@pytest.mark.parametrize("kind", [FolderStore, Refusing])
def test_every_byte_is_kept_in_parts(
    tmp_path: Path, kind: type[FolderStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.program.log._PART_BYTES", 1000)
    monkeypatch.setattr("training.durable.program.log._SEND_SECONDS", 0.01)
    monkeypatch.setattr("training.durable.program.log._FIRST_SECONDS", 0.01)
    store, fed = kind(tmp_path / "run"), list[bytes]()
    log = ProgramLog(store, "0001-aa", tmp_path / "program.log", fed.extend)
    text = b"".join(b"%d\xff\x00 \r\n" % number for number in range(1000))
    printed(log, *(text[start : start + 777] for start in range(0, len(text), 777)))
    assert whole(store) == text == (tmp_path / "program.log").read_bytes()
    assert fed == text.removesuffix(b"\r\n").split(b"\r\n")
    assert len(store.sizes(LOGS)) == -(-len(text) // 1000)
    assert log.tail[-1].startswith("999")


def test_a_full_disk_stops_no_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = ProgramLog(FolderStore(tmp_path / "run"), "0001-aa", Path("/dev/full"), lambda data: None)
    printed(log, b"one\n", b"two\n")
    out = capfd.readouterr().out
    assert "further output is shown, not kept" in out
    assert out.count("two\n") == 1


class Gone(io.StringIO):
    """A standard output whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_standard_output_that_nobody_reads_stops_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    store = FolderStore(tmp_path / "run")
    log = ProgramLog(store, "0001-aa", tmp_path / "program.log", lambda data: None)
    printed(log, b"one\n" * 1000)
    assert whole(store) == b"one\n" * 1000
