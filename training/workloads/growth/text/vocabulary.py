"""Decodes tokens by a byte-level BPE's tokenizer.json; encodes text where a dataset is made.

An instance only decodes tokens, so it needs no tokenizer library; the package tokenizers encodes
text. A tokenizer is the user's (tokenizer.json, or GPT-2's vocab.json and merges.txt) or, like
GPT-2's, is trained here on the text: every text can be encoded and decoded without loss.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from contract.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

END_OF_TEXT = "<|endoftext|>"
_UNKNOWN = "\ufffd".encode()
_UTF_8 = (*range(0xC0), *range(0xC2, 0xF5))
# The names of GPT-2's files in transformers, and at OpenAI.
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The bytes of each token; a character may be spread over several tokens."""

    tokens: Mapping[int, bytes]
    end_of_text: int

    def __len__(self) -> int:
        """Return the number of rows that a model needs."""
        return max(self.tokens) + 1

    def missing_bytes(self) -> Iterator[int]:
        """Yield the bytes of UTF-8 without a token; characters with them cannot be encoded."""
        there = set(self.tokens.values())
        return (byte for byte in _UTF_8 if bytes([byte]) not in there)

    def text(self, tokens: Iterable[int]) -> str:
        """Decode tokens to text; bytes that are not a character become U+FFFD."""
        joined = b"".join(self.tokens.get(token, _UNKNOWN) for token in tokens)
        return joined.decode(errors="replace")


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a tokenizer.json; UserError for another file or a kind other than GPT-2's."""
    return vocabulary_of(path.read_bytes(), str(path))


def vocabulary_of(tokenizer: str | bytes, path: str) -> Vocabulary:
    """Return the vocabulary in the text of a tokenizer.json; messages call it `path`."""
    try:
        content = json.loads(tokenizer)
        kind, decoder = content["model"]["type"], (content.get("decoder") or {}).get("type")
        learned: Mapping[str, int] = content["model"]["vocab"]
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a tokenizer.json ({error!r}); give another") from error
    if (kind, decoder) != ("BPE", "ByteLevel"):
        raise UserError(
            f"{path} has a model {kind} and a decoder {decoder}; give a byte-level BPE (model BPE, "
            "decoder ByteLevel), such as GPT-2's"
        )
    return _vocabulary(learned, added, path)


def _vocabulary(learned: Mapping[str, int], added: Mapping[str, int], path: str) -> Vocabulary:
    of_character = _byte_of_character()
    try:
        tokens = {
            number: bytes(of_character[character] for character in token)
            for token, number in learned.items()
            if token not in added
        }
    except KeyError as error:
        raise UserError(
            f"{path} has a token with the character {error}, which does not stand for a byte; give "
            "a byte-level BPE such as GPT-2's"
        ) from error
    tokens |= {number: token.encode() for token, number in added.items()}
    end_of_text = added.get(END_OF_TEXT, learned.get(END_OF_TEXT))
    if end_of_text is None:
        raise UserError(
            f"{path} has no token {END_OF_TEXT}, which ends each document; give a tokenizer with it"
        )
    return Vocabulary(tokens=tokens, end_of_text=end_of_text)


def _byte_of_character() -> Mapping[str, int]:
    """Return GPT-2's alphabet: a visible character per byte, so no token has white space.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    moved = {chr(256 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in visible} | moved


def train_tokenizer(texts: Iterable[Sequence[str]], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE on batches of texts; it is smaller if nothing is left to merge."""
    _check_package()
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # Sorted, because the library returns it in any order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def load_tokenizer(path: Path) -> "Tokenizer":
    """Load a tokenizer from a tokenizer.json, or a folder with it or with GPT-2's two files."""
    _check_package()
    from tokenizers import Tokenizer

    if path.is_dir() and not (path / "tokenizer.json").is_file():
        pair = next((p for p in _PAIRS if all((path / name).is_file() for name in p)), None)
        if pair is None:
            raise UserError(
                f"{path} has neither tokenizer.json nor vocab.json with merges.txt; give a folder "
                "with either"
            )
        tokenizer = _loaded(path, lambda: _of_pair(path / pair[0], path / pair[1]))
    else:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"the tokenizer {file} does not exist; give a tokenizer.json")
        tokenizer = _loaded(file, lambda: Tokenizer.from_file(str(file)))
    # The file may have these settings from other uses; documents must not be cut or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise UserError(
            f"{path} has no token {END_OF_TEXT}, which ends each document; give a tokenizer with it"
        )
    return tokenizer


def encode(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Tokenize texts on all cores; special tokens' names in them are ordinary text."""
    tokenizer.encode_special_tokens = True
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.asarray(each.ids, dtype=np.int64) for each in found]


def _byte_level(model: "models.BPE") -> "Tokenizer":
    """Return a tokenizer like GPT-2's: words with the space before them, and any byte."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pair(vocab: Path, merges: Path) -> "Tokenizer":
    from tokenizers import models

    tokenizer = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _loaded(path: Path, load: Callable[[], "Tokenizer"]) -> "Tokenizer":
    try:
        return load()
    except Exception as error:  # the Rust library raises nothing more specific
        raise UserError(f"{path} is not a tokenizer ({error}); give another") from error


def _check_package() -> None:
    if find_spec("tokenizers") is None:
        raise UserError(
            "tokenizing text requires the package tokenizers, which is not installed; make the "
            "dataset where it is (`pip install tokenizers`), and upload it"
        )
