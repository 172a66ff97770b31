"""Documents are read from text files block by block; what cannot be read is named with its line."""

import gzip
import json
from pathlib import Path

import pytest

from contract.errors import UserError
from training.durable.sources import ImportSource
from training.workloads.growth.text import text_dataset as documents_module
from training.workloads.growth.text.text_dataset import (
    TextOptions,
    check_kinds,
    import_dataset,
    read_pieces,
)

END = "<|endoftext|>"


def documents(path: Path, separator: str = END) -> list[str]:
    files = ImportSource(path, path).files()
    check_kinds(files)
    found, pending = list[str](), ""
    for piece in read_pieces(files, separator):
        pending += piece.text
        if piece.ends_document:
            found.append(pending)
            pending = ""
    assert not pending, "the last document has an end"
    return found


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_BLOCK_BYTES", 5)
    monkeypatch.setattr(documents_module, "_PIECE_CHARACTERS", 16)


TEXTS = ["A fox.\n\nIt ran.", "Grüße, 你好 🦊!", "x" * 50, "many words in one long line of text"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_documents_between_separators_whatever_the_blocks(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "stories.txt"
    path.write_text(mark + f"\n{END}\n".join([*TEXTS, "", " \n"]) + END, encoding="utf-8")
    assert documents(path) == TEXTS
    path.write_text(mark + "\n".join(TEXTS), encoding="utf-8")
    assert documents(path) == ["\n".join(TEXTS)]
    path.write_text("one\n---\ntwo\n---\n")
    assert documents(path, "---") == ["one", "two"]


@pytest.mark.usefixtures("small_blocks")
def test_lines_of_windows_end_as_others(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_bytes(b"One.\r\nIt goes on.\r\n\r\nTwo.\r\n\r\nThree.\r\n")
    assert documents(path, "\n\n") == ["One.\nIt goes on.", "Two.", "Three."]


@pytest.mark.usefixtures("small_blocks")
def test_a_long_document_comes_in_pieces_cut_before_white_space(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    words = " ".join(f"word{number}" for number in range(40))
    path.write_text(words)
    pieces = list(read_pieces(ImportSource(path, tmp_path).files(), END))
    assert len(pieces) > 10
    assert "".join(piece.text for piece in pieces) == words
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.text.startswith(" word") for piece in pieces[1:])
    assert pieces[-1].read == path.stat().st_size


@pytest.mark.usefixtures("small_blocks")
def test_lines_of_json_and_packed_files(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": text, "id": 1}) for text in [*TEXTS, "", f"a {END} b"])
    (tmp_path / "a.jsonl").write_text(lines + "\n\n")
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write(f"packed{END}too")
    assert documents(tmp_path) == [*TEXTS, f"a {END} b", "packed", "too"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            b"one\ntwo\nthr\xffee",
            r"a\.txt, line 3 has the byte 0xff, which is not valid UTF-8",
        ),
        ("a.txt", b"one\ntw\xc3", r"a\.txt, line 2 has the byte 0xc3"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', r"a\.jsonl, line 2 has the byte 0xff"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"', r"a\.jsonl, line 3 is not JSON \(Expecting"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1 is not JSON \(maximum recursion depth"),
        (
            "a.jsonl",
            b'{"story": "x"}',
            r"has no .text. .*, but 'story'; name the text with --override field=story$",
        ),
        ("a.jsonl", b'{"text": 7}', r'a\.jsonl, line 1 has no "text" with a string'),
        ("a.jsonl", b'{"id": "x", "text": null}', r'line 1 has null as "text"; make it a string'),
        ("a.jsonl", b'["x"]', r'a\.jsonl, line 1 has no "text" with a string'),
        ("a.jsonl", b'{"text": "\\ud83e"}', r"a\.jsonl, line 1 has half a character"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz cannot be unpacked: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], r"a\.txt\.gz cannot be unpacked: "),
        ("a.pdf", b"", r"a\.pdf cannot be imported as text; give \.txt files, \.jsonl files"),
        ("a.gz", b"", r"a\.gz cannot be imported as text"),
        ("a.jsonl.zst", b"", r"a\.jsonl\.zst cannot be read; convert it: zstd -d --rm /.*zst$"),
        (
            "a.parquet",
            b"",
            r"cannot be read; convert it: pip install datasets && python -c .* && rm",
        ),
        ("a.arrow", b"", r"convert it: .* datasets\.Dataset\.from_file\(.* && rm"),
    ],
)
def test_fails_for_what_cannot_be_read(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        documents(tmp_path)


def test_fails_for_a_line_that_has_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_LINE_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * (1 << 20)}))
    with pytest.raises(UserError, match="line 1 is longer than 1 MiB; put one text a line"):
        documents(tmp_path)


def test_json_keeps_its_spaces_and_may_name_its_field_otherwise(tmp_path: Path) -> None:
    """A program's first line is indented like the others; README and LICENSE are no text."""
    code = "    if x:\n        y()\n"
    lines = [json.dumps({"content": text, "path": "x.py"}) for text in (code, "  \n")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    files = ImportSource(tmp_path, tmp_path).files()
    assert [piece.text for piece in read_pieces(files, END, "content")] == [code]
    for name in ("README.md", "LICENSE", "dataset_infos.json"):
        (tmp_path / name).write_text("no text")
    options = TextOptions(field="content", vocab_size=257, held_out_of=2)
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0]] * 8))
    meta = import_dataset(
        ImportSource(tmp_path, tmp_path).files(),
        made(tmp_path),
        0,
        lambda done, total: None,
        options,
    )
    assert sum(split["documents"] for split in meta["splits"].values()) == 8
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UserError, match="cannot be imported as text; give"):
        import_dataset(ImportSource(tmp_path / "README.md", tmp_path).files(), tmp_path, 0, print)


def made(folder: Path) -> Path:
    (folder / "out").mkdir()
    return folder / "out"
