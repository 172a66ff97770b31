"""Reads documents from text files, a block at a time: .txt, .jsonl with "text", and either as .gz.

Files of any size take the same memory. Invalid UTF-8 or JSON is refused, naming file and line.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import BinaryIO, NamedTuple, cast

from contract.errors import UserError
from training.durable import SourceFile

_BLOCK_BYTES = 1 << 20
# A longer document is tokenized in pieces, which are cut before white space.
_PIECE_CHARACTERS = 1 << 20
_LINE_BYTES = 1 << 26
_KINDS = (".txt", ".jsonl")


class Piece(NamedTuple):
    """A document, or the next part of a long one."""

    text: str
    ends_document: bool
    split: str | None  # from the layout of the user's files; None: decided here
    read: int  # bytes of all text so far


def check_kinds(files: Sequence[SourceFile]) -> None:
    """Raise UserError for the first file that is not text."""
    for file in files:
        if _kind(file) not in _KINDS:
            raise UserError(
                f"{file.name} cannot be imported as text; give .txt files, .jsonl files with "
                '"text" in each line, or either with .gz'
            )


def read_pieces(files: Sequence[SourceFile], separator: str) -> Iterator[Piece]:
    """Yield the documents of all files, in order; `separator` separates those of a .txt."""
    read_before = 0
    for file in files:
        with file.path.open("rb") as raw:
            is_packed = file.name.endswith(".gz")
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_packed else raw
            of_kind = _of_lines(file.name, stream)
            if _kind(file) == ".txt":
                of_kind = _of_text(file.name, stream, separator)
            try:
                for text, ends in of_kind:
                    yield Piece(text, ends, file.split, read_before + raw.tell())
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise UserError(
                    f"{file.name} cannot be unpacked: {error}; make it again"
                ) from error
            read_before += raw.tell()


def _kind(file: SourceFile) -> str:
    return PurePath(file.name.removesuffix(".gz")).suffix.lower()


def _of_text(name: str, stream: BinaryIO, separator: str) -> Iterator[tuple[str, bool]]:
    """Yield parts of documents, and whether each ends one; strip white space around documents."""
    pending, has_begun = "", False
    for block in _decoded(name, stream):
        *whole, pending = (pending + block).split(separator)
        for text in whole:
            yield from _parts(text, has_begun)
            has_begun = False
        while len(pending) > _PIECE_CHARACTERS + len(separator):
            cut = _cut(pending)
            part = pending[:cut] if has_begun else pending[:cut].lstrip()
            pending = pending[cut:]
            if part:
                has_begun = True
                yield part, False
    yield from _parts(pending, has_begun)


def _parts(text: str, has_begun: bool) -> Iterator[tuple[str, bool]]:
    """Yield the end of a document in pieces; nothing for an empty document."""
    text = text.rstrip() if has_begun else text.strip()
    while len(text) > _PIECE_CHARACTERS:
        cut = _cut(text)
        yield text[:cut], False
        text, has_begun = text[cut:], True
    if text or has_begun:
        yield text, True


def _cut(text: str) -> int:
    """Return where to cut: before white space, which byte-level BPE joins to what follows."""
    for blank in ("\n", " "):
        place = text.rfind(blank, 1, _PIECE_CHARACTERS)
        if place > 0:
            return place
    return _PIECE_CHARACTERS


def _decoded(name: str, stream: BinaryIO) -> Iterator[str]:
    """Yield blocks of text without a byte order mark, in which every line ends with \\n."""
    utf_8 = codecs.getincrementaldecoder("utf-8-sig")()
    decoder = io.IncrementalNewlineDecoder(utf_8, translate=True)
    num_lines = 0
    is_last = False
    while not is_last:
        block = stream.read(_BLOCK_BYTES)
        is_last = not block
        try:
            text = decoder.decode(block, final=is_last)
        except UnicodeDecodeError as error:
            line = num_lines + error.object[: error.start].count(b"\n") + 1
            raise _no_utf8(name, line, error) from error
        num_lines += text.count("\n")
        yield text


def _of_lines(name: str, stream: BinaryIO) -> Iterator[tuple[str, bool]]:
    number = 0
    while line := stream.readline(_LINE_BYTES):
        number += 1
        where = f"{name}, line {number}"
        if len(line) == _LINE_BYTES:
            raise UserError(f"{where} is longer than {_LINE_BYTES >> 20} MiB; put one text a line")
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["text"] if isinstance(entry, dict) else None
        except UnicodeDecodeError as error:
            raise _no_utf8(name, number, error) from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON ({error}); correct or delete it") from error
        except KeyError:
            text = None
        if not isinstance(text, str):
            raise UserError(f'{where} has no "text" with a string; write {{"text": "..."}}')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where} has half a character ({error}); correct it") from error
        yield from _parts(text, has_begun=False)


def _no_utf8(name: str, line: int, error: UnicodeDecodeError) -> UserError:
    byte = error.object[error.start]
    return UserError(
        f"{name}, line {line} has the byte {byte:#04x}, which is not valid UTF-8; convert the file "
        "to UTF-8, or omit it"
    )
