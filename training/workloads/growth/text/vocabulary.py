"""Turns tokens into text with a tokenizer.json of a byte-level BPE, as GPT-2's is; nothing else.

An instance needs no more, so no tokenizer library is installed there: text is encoded where the
dataset is made (tokenizer.py).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from training.errors import UserError

END_OF_TEXT = "<|endoftext|>"
_UNKNOWN = "\ufffd".encode()
_UTF_8 = (*range(0xC0), *range(0xC2, 0xF5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The bytes of each token; a character may be spread over several tokens."""

    tokens: Mapping[int, bytes]
    end_of_text: int

    def __len__(self) -> int:
        """Rows that a model needs."""
        return max(self.tokens) + 1

    def missing_bytes(self) -> Iterator[int]:
        """The bytes of UTF-8 that no token stands for: characters with them cannot be written."""
        there = set(self.tokens.values())
        return (byte for byte in _UTF_8 if bytes([byte]) not in there)

    def text(self, tokens: Iterable[int]) -> str:
        """The text of tokens; what is no character is shown as U+FFFD."""
        joined = b"".join(self.tokens.get(token, _UNKNOWN) for token in tokens)
        return joined.decode(errors="replace")


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a tokenizer.json; UserError if it is none, or of another kind than GPT-2's."""
    return vocabulary_of(path.read_bytes(), str(path))


def vocabulary_of(tokenizer: str | bytes, path: str) -> Vocabulary:
    """The vocabulary in the text of a tokenizer.json; `path` names it in messages."""
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
    """GPT-2's alphabet: a visible character for each byte, so that no token has white space.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    moved = {chr(256 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in visible} | moved
