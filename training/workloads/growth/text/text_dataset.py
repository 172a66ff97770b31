"""Makes a text dataset from stories that the project writes, or from users' own text.

Text is streamed, so memory does not grow with it. An import keeps its position in its folder: after
an interruption, the same command continues from there, overwrites what was written since, and ends
with the same files.

Reads documents from text files, a block at a time: .txt, .jsonl with "text", and either as .gz.

Files of any size take the same memory. Invalid UTF-8 or JSON is refused, naming file and line.
"""

import codecs
import gzip
import io
import json
import os
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from contract.errors import UserError
from contract.keys import UNFINISHED
from training import derive_seed
from training.durable import FolderOutput, SourceFile, split_within, without_strays
from training.workloads.growth.text.stories import STORY_BYTES, write_story
from training.workloads.growth.text.tokens import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    Vocabulary,
    encode,
    load_tokenizer,
    read_vocabulary,
    shard_name,
    token_type,
    train_tokenizer,
    vocabulary_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from training import Progress

_BLOCK_BYTES = 1 << 20
# A longer document is tokenized in pieces, which are cut before white space.
_PIECE_CHARACTERS = 1 << 20
_LINE_BYTES = 1 << 26
_KINDS = (".txt", ".jsonl")
# What makes a file of these kinds from others, in the folder that is imported.
_CONVERTS = {
    ".zst": "zstd -d --rm {0}",
    ".parquet": 'pip install datasets && python -c "import datasets, sys; '
    "datasets.Dataset.from_parquet(sys.argv[1]).to_json(sys.argv[1] + '.jsonl')\" {0} && rm {0}",
}
# What `save_to_disk` writes.
_CONVERTS |= {".arrow": _CONVERTS[".parquet"].replace("from_parquet", "from_file")}


class Piece(NamedTuple):
    """A document, or the next part of a long one."""

    text: str
    ends_document: bool
    split: str | None  # from the layout of the user's files; None: decided here
    read: int  # bytes of all text so far


def check_kinds(files: Sequence[SourceFile]) -> None:
    """Raise UserError for the first file that is not text."""
    for file in files:
        for suffix, convert in _CONVERTS.items():
            if file.name.lower().endswith(suffix):
                command = convert.format(shlex.quote(str(file.path)))
                raise UserError(f"{file.name} cannot be read; convert it: {command}")
        if _kind(file) not in _KINDS:
            raise UserError(
                f"{file.name} cannot be imported as text; give .txt files, .jsonl files with "
                '"text" in each line, or either with .gz'
            )


def read_pieces(
    files: Sequence[SourceFile], separator: str, named: str = "text"
) -> Iterator[Piece]:
    """Yield the documents of all files, in order.

    `separator` separates those of a .txt, `named` is the field of a .jsonl that has them.
    """
    read_before = 0
    for file in files:
        with file.path.open("rb") as raw:
            is_packed = file.name.endswith(".gz")
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_packed else raw
            of_kind = _of_lines(file.name, stream, named)
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


def _parts(text: str, has_begun: bool, *, is_stripped: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield the end of a document in pieces; nothing for an empty document."""
    if is_stripped:
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


def _of_lines(name: str, stream: BinaryIO, named: str) -> Iterator[tuple[str, bool]]:
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
            text = entry.get(named) if isinstance(entry, dict) else None
        except UnicodeDecodeError as error:
            raise _no_utf8(name, number, error) from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON ({error}); correct or delete it") from error
        if not isinstance(text, str):
            raise UserError(_no_text(where, entry, named))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where} has half a character ({error}); correct it") from error
        if text.strip():
            # As it is: the spaces before the first line of a program mean something.
            yield from _parts(text, has_begun=False, is_stripped=False)


def _no_text(where: str, entry: Any, named: str) -> str:
    """Return what to do about a line of JSON whose field has no string."""
    texts = (
        [name for name, value in entry.items() if isinstance(value, str)]
        if entry and isinstance(entry, dict)
        else []
    )
    if texts and named in entry:
        found = json.dumps(entry[named])[:40]
        return f'{where} has {found} as "{named}"; make it a string, or delete the line'
    if texts:
        return (
            f'{where} has no "{named}" with a string, but {", ".join(map(repr, texts))}; name the '
            f"text with --override {shlex.quote(f'field={texts[0]}')}"
        )
    return f'{where} has no "{named}" with a string; write {{"{named}": "..."}}'


def _no_utf8(name: str, line: int, error: UnicodeDecodeError) -> UserError:
    byte = error.object[error.start]
    return UserError(
        f"{name}, line {line} has the byte {byte:#04x}, which is not valid UTF-8; convert the file "
        "to UTF-8, or omit it"
    )


# 64 MiB for a vocabulary of up to 65,536 tokens: a sync fetches several files at a time.
_SHARD_TOKENS = 1 << 25


@dataclass(kw_only=True, slots=True)
class _SplitCounts:
    """Counts of what has been written of a split; `bytes` counts its text in UTF-8."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0


_NONE = _SplitCounts()


@dataclass(kw_only=True, slots=True)
class _ImportPosition:
    """The position of an import: what has been read, and a digest of it."""

    pieces: int = 0
    digest: str = ""
    splits: dict[str, _SplitCounts] = field(default_factory=dict)

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits.values())


def _kept_position(out: Path, identity: Mapping[str, Any]) -> _ImportPosition:
    """Return where an interrupted import stopped; UserError if it was another import."""
    path = out / UNFINISHED
    if not path.is_file():
        return _ImportPosition()
    kept = json.loads(path.read_bytes())
    changed = [key for key in identity if kept["identity"].get(key) != identity[key]]
    if changed or kept["identity"].keys() != identity.keys():
        what = changed[0] if changed else "source"
        raise UserError(f"{out} has an unfinished dataset with another {what}; give a new folder")
    splits = {name: _SplitCounts(**counts) for name, counts in kept["splits"].items()}
    return _ImportPosition(pieces=kept["pieces"], digest=kept["digest"], splits=splits)


def _keep(out: Path, identity: Mapping[str, Any], position: _ImportPosition) -> None:
    """Save a position, with the identity of the import."""
    record = {"workload": "growth", "identity": identity, **asdict(position)}
    FolderOutput(out).write(UNFINISHED, json.dumps(record).encode())


def _write_tokens(
    out: Path, split: str, first: int, tokens_T: NDArray[Any], *, shard_tokens: int = _SHARD_TOKENS
) -> None:
    """Write the split's tokens from number `first` on to disk, and cut off what followed."""
    done = 0
    while done < len(tokens_T):
        number, there = divmod(first + done, shard_tokens)
        part = tokens_T[done : done + shard_tokens - there]
        path = out / shard_name(split, number)
        with path.open("r+b" if there else "wb") as file:
            file.seek(there * part.itemsize)
            file.write(part.tobytes())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        done += len(part)


# 256 bytes and the end of text.
_SMALLEST_VOCABULARY = 257
_GPT2_VOCABULARY = 50257
# The stories use several hundred words; half of these tokens are whole words.
_STORIES_VOCABULARY = 1024
# A tokenizer is trained on at most this much text, taken evenly from all of it.
_TRAINING_BYTES = 1 << 28
# The amount of text that is tokenized at once, on all cores.
_BATCH_CHARACTERS = 1 << 20
# The position is saved this often; an interruption costs the few seconds since then.
_KEPT_EVERY_BATCHES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """Options for `data make` and `data import --override name=value`."""

    # A tokenizer.json, or a folder with it or with GPT-2's vocab.json and merges.txt.
    tokenizer: str = ""
    # For a tokenizer trained here: by default 50257 (as GPT-2) for imported text, 1024 for stories.
    vocab_size: int | None = None
    # Separates the documents of a .txt; \n in it stands for the end of a line.
    separator: str = END_OF_TEXT
    # The field of a .jsonl that has the text.
    field: str = "text"
    # One in this many documents is held out for validation, unless the source has splits.
    held_out_of: int = 20

    def __post_init__(self) -> None:
        if self.tokenizer and self.vocab_size is not None:
            raise UserError("a tokenizer has its own vocabulary; give tokenizer or vocab_size")
        if self.vocab_size is not None and self.vocab_size < _SMALLEST_VOCABULARY:
            raise UserError(
                f"vocab_size is {self.vocab_size}; give at least {_SMALLEST_VOCABULARY} (256 bytes "
                f"and {END_OF_TEXT})"
            )
        if not self.separator:
            raise UserError(f"separator is empty; give what separates texts, as in {END_OF_TEXT}")
        if self.held_out_of < 2:
            raise UserError(f"held_out_of is {self.held_out_of}; give at least 2")


_DEFAULTS = TextOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Text that can be read again from its beginning, and its size."""

    identity: Mapping[str, Any]  # JSON: must be equal for an interrupted import to continue
    pieces: Callable[[], Iterator[Piece]]
    num_bytes: int
    unit_bytes: int  # the unit of progress: a story, or a megabyte
    vocab_size: int  # unless the options set one


def make_dataset(
    out: Path, count: int, seed: int, progress: "Progress", options: TextOptions = _DEFAULTS
) -> Mapping[str, Any]:
    """Write `count` stories of the corpus `seed` as tokens into `out`; return the meta."""
    if seed < 0:
        raise UserError(f"seed is {seed}; give 0 or more")
    if count < options.held_out_of:
        raise UserError(
            f"count is {count}; give at least {options.held_out_of} stories, one of which is held "
            "out"
        )
    stories = _Source(
        identity={"count": count},
        pieces=lambda: (
            Piece(write_story(seed, n), True, None, (n + 1) * STORY_BYTES) for n in range(count)
        ),
        num_bytes=count * STORY_BYTES,
        unit_bytes=STORY_BYTES,
        vocab_size=_STORIES_VOCABULARY,
    )
    return _write(stories, out, seed, progress, options)


def import_dataset(
    files: Sequence[SourceFile],
    out: Path,
    seed: int,
    progress: "Progress",
    options: TextOptions = _DEFAULTS,
) -> Mapping[str, Any]:
    """Write the text of `files` as tokens into `out`; return the meta.

    Without splits of their own, one of `held_out_of` documents is held out; `seed` decides which.
    """
    files = _in_named_splits(without_strays(files, _KINDS))
    check_kinds(files)
    if files[0].split is not None:
        for split in ("train", "validation"):
            if all(file.split != split for file in files):
                raise UserError(f"split {split} has no files; add some, or use no splits")
    sizes = [[file.name, file.path.stat().st_size] for file in files]
    num_bytes = sum(file.path.stat().st_size for file in files)
    text = _Source(
        identity={"files": sizes},
        pieces=lambda: read_pieces(files, options.separator.replace("\\n", "\n"), options.field),
        num_bytes=num_bytes,
        unit_bytes=1_000_000,
        vocab_size=_GPT2_VOCABULARY,
    )
    return _write(text, out, seed, progress, options)


def _in_named_splits(files: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """Give files without splits those of their names, if each has one: train.jsonl, test.jsonl."""
    names = [split_within(PurePath(file.name).name) for file in files]
    if None in names or len(set(names)) < 2 or files[0].split is not None:
        return files
    return [replace(file, split=name) for file, name in zip(files, names, strict=True)]


def _write(
    source: _Source, out: Path, seed: int, progress: "Progress", options: TextOptions
) -> Mapping[str, Any]:
    identity = {**source.identity, "seed": seed, "options": asdict(options)}
    position = _kept_position(out, identity)
    tokenizer = _tokenizer(source, out, options, identity)
    vocabulary = read_vocabulary(out / TOKENIZER_FILE)
    digest = blake2b()
    pieces = source.pieces()
    for piece in islice(pieces, position.pieces):
        _update(digest, piece)
    if position.pieces and digest.hexdigest() != position.digest:
        raise UserError(f"the text has changed since the import into {out} began; use a new folder")
    total = -(-source.num_bytes // source.unit_bytes)
    for number, batch in enumerate(_batches(pieces), 1):
        _write_batch(batch, tokenizer, vocabulary, out, position, seed, options)
        for piece in batch:
            _update(digest, piece)
        position.pieces += len(batch)
        progress(batch[-1].read // source.unit_bytes, total)
        if number % _KEPT_EVERY_BATCHES == 0:
            position.digest = digest.hexdigest()
            _keep(out, identity, position)
    if source.num_bytes % source.unit_bytes:
        progress(total, total)
    _check_splits(out, position, options)
    position.digest = digest.hexdigest()
    _keep(out, identity, position)
    return {
        "tokenizer": Path(options.tokenizer).name or "trained on this text",
        "vocab_size": len(vocabulary),
        "end_of_text": vocabulary.end_of_text,
        "seed": seed,
        "splits": {name: asdict(split) for name, split in sorted(position.splits.items())},
    }


def _write_batch(
    batch: Sequence[Piece],
    tokenizer: "Tokenizer",
    vocabulary: Vocabulary,
    out: Path,
    position: _ImportPosition,
    seed: int,
    options: TextOptions,
) -> None:
    """Tokenize pieces and append each to its split."""
    number, of_split = position.documents, dict[str, list[NDArray[np.int64]]]()
    end_of_text = np.array([vocabulary.end_of_text])
    encoded = encode(tokenizer, [piece.text for piece in batch])
    for piece, tokens_T in zip(batch, encoded, strict=True):
        # Some change only what comes late, such as the first ligature.
        _refuse_changed(piece.text, vocabulary.text(tokens_T.tolist()))
        name = piece.split or _split_of(number, seed, options.held_out_of)
        split = position.splits.setdefault(name, _SplitCounts())
        parts = of_split.setdefault(name, [])
        parts.append(tokens_T)
        split.bytes += len(piece.text.encode())
        if piece.ends_document:
            parts.append(end_of_text)
            split.documents += 1
            number += 1
    for name, parts in of_split.items():
        tokens_T = np.concatenate(parts).astype(token_type(len(vocabulary)))
        _write_tokens(out, name, position.splits[name].tokens, tokens_T)
        position.splits[name].tokens += len(tokens_T)


def _split_of(document: int, seed: int, held_out_of: int) -> str:
    """Return a document's split; one of each `held_out_of` consecutive ones is held out."""
    block, place = divmod(document, held_out_of)
    chosen = derive_seed("held out", seed, block) % held_out_of
    return "validation" if place == chosen else "train"


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in groups of about _BATCH_CHARACTERS."""
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenizer(
    source: _Source, out: Path, options: TextOptions, identity: Mapping[str, Any]
) -> "Tokenizer":
    """Return an interrupted import's tokenizer, the user's, or one newly trained on this text."""
    if (out / TOKENIZER_FILE).is_file():
        return load_tokenizer(out / TOKENIZER_FILE)
    if options.tokenizer:
        tokenizer = load_tokenizer(Path(options.tokenizer))
    else:
        size = options.vocab_size or source.vocab_size
        tokenizer = train_tokenizer(_training_texts(source), size)
    _check_round_trip(tokenizer, source)
    _keep(out, identity, _ImportPosition())
    FolderOutput(out).write(TOKENIZER_FILE, tokenizer.to_str().encode())
    return tokenizer


def _training_texts(source: _Source) -> Iterator[list[str]]:
    """Yield at most _TRAINING_BYTES of the text, taken evenly from all of it."""
    every = max(1, -(-source.num_bytes // _TRAINING_BYTES))
    for batch in _batches(islice(source.pieces(), 0, None, every)):
        yield [piece.text for piece in batch]


def _check_round_trip(tokenizer: "Tokenizer", source: _Source) -> None:
    """Raise UserError if text cannot be read back: some tokenizers first change letters."""
    vocabulary = vocabulary_of(tokenizer.to_str(), "the tokenizer")
    if (missing := next(vocabulary.missing_bytes(), None)) is not None:
        raise UserError(
            f"the tokenizer has no token for the byte {missing:#04x}, so text with it would be "
            "lost; use a tokenizer that has all bytes, such as GPT-2's"
        )
    for batch in islice(_batches(source.pieces()), 1):
        for piece, tokens_T in zip(batch, encode(tokenizer, [p.text for p in batch]), strict=True):
            _refuse_changed(piece.text, vocabulary.text(tokens_T.tolist()))


def _refuse_changed(text: str, back: str) -> None:
    # To Unicode the same text may have other characters: Qwen's tokenizers join letter and accent.
    if back != text and normalize("NFC", back) != normalize("NFC", text):
        same = (a == b for a, b in zip(text, back, strict=False))
        at = next((n for n, is_same in enumerate(same) if not is_same), 0)
        raise UserError(
            f"the tokenizer changes its text: {text[at : at + 20]!r} becomes "
            f"{back[at : at + 20]!r}; use one that changes nothing, such as GPT-2's"
        )


def _check_splits(out: Path, position: _ImportPosition, options: TextOptions) -> None:
    """Raise UserError if a split has no document."""
    missing = [n for n in ("train", "validation") if not position.splits.get(n, _NONE).documents]
    if not missing:
        return
    # The next command will have another source or other options.
    (out / UNFINISHED).unlink()
    if not (num := position.documents):
        raise UserError("the files have no text; give files with text")
    fewer = f" hold out one of {num} with --override held_out_of={num}," if num > 1 else ""
    raise UserError(
        f"split {missing[0]} got none of the {num} documents, as one in {options.held_out_of} is "
        f"held out;{fewer} name a separator of documents other than {options.separator!r}, "
        "such as an empty line (--override 'separator=\\n\\n'), or lay the files out as "
        "train/FILE and validation/FILE"
    )


def _update(digest: blake2b, piece: Piece) -> None:
    digest.update(piece.text.encode())
    digest.update(b"\x01" if piece.ends_document else b"\x00")
