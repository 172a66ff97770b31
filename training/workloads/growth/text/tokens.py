"""A text dataset as a workload reads it: token shards, memory mapped, cut into windows.

Files: SPLIT-00000.bin, SPLIT-00001.bin ... (little-endian uint16, or uint32 for a vocabulary above
65,536) and tokenizer.json. Documents follow one another, each ended by the end-of-text token.

Decodes tokens by a byte-level BPE's tokenizer.json; encodes text where a dataset is made.

An instance only decodes tokens, so it needs no tokenizer library; the package tokenizers encodes
text. A tokenizer is the user's (tokenizer.json, or GPT-2's vocab.json and merges.txt) or, like
GPT-2's, is trained here on the text: every text can be encoded and decoded without loss.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import UserError
from training import Dataset, Order, Samples

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
    # Nor begin with a token, which transformers would add to a prompt.
    tokenizer.post_processor = None
    # Nor drawn another way each time.
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    vocabulary_of(tokenizer.to_str(), str(path))
    # Only the name of a special token can be text in a document.
    tokenizer.add_special_tokens([END_OF_TEXT])
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

    return _byte_level(models.BPE.from_file(str(vocab), str(merges)))


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


TOKENIZER_FILE = "tokenizer.json"
# A model most of whose rows would never be used was sized for another vocabulary.
_LEAST_SHARE_USED = 0.5
_MAKE_ONE = (
    "make one with `python -m training data make --workload growth`, or from your own text with "
    "`data import`"
)


def shard_name(split: str, number: int) -> str:
    """Return the name of a split's file `number`."""
    return f"{split}-{number:05}.bin"


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which a vocabulary's tokens are stored."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True, kw_only=True, slots=True)
class _SplitTokens:
    """All tokens of a split, in the order of the text, across its shards."""

    split: str
    shards: Sequence[NDArray[Any]]
    starts: Sequence[int]  # each shard's first token
    names: Sequence[str]
    vocab_size: int
    end_of_text: int

    def __len__(self) -> int:
        return self.starts[-1] + len(self.shards[-1])

    def read(self, first: int, count: int) -> Tensor:
        """Return `count` tokens from `first` on, int64 [count]; fewer at the end of the split."""
        end = min(first + count, len(self))
        tokens_T = np.empty(max(0, end - first), dtype=np.int64)
        done = 0
        while done < len(tokens_T):
            number = bisect_right(self.starts, first + done) - 1
            there = first + done - self.starts[number]
            part = self.shards[number][there : there + len(tokens_T) - done]
            tokens_T[done : done + len(part)] = part
            done += len(part)
        if done and tokens_T.max() >= self.vocab_size:
            name = self.names[bisect_right(self.starts, first) - 1]
            raise UserError(
                f"{name} has the token {tokens_T.max()} near position {first}, but the vocabulary "
                f"has {self.vocab_size}; make the dataset again"
            )
        return torch.from_numpy(tokens_T)

    def beginnings(self, count: int, length: int) -> list[Tensor]:
        """Return as prompts the first `length` tokens of the first `count` longer documents."""
        found: list[Tensor] = []
        first, block = 0, 1 << 16
        while len(found) < count and first < len(self):
            text_T = self.read(first, block)
            ends = (text_T == self.end_of_text).nonzero().flatten().tolist()
            begin = 0
            for end in ends:
                if end - begin > length and len(found) < count:
                    found.append(text_T[begin : begin + length].clone())
                begin = end + 1
            if begin == 0:  # a document that fills an entire block
                if len(text_T) > length:
                    found.append(text_T[:length].clone())
                break
            first += begin
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _TokenSamples(Samples):
    """A split as samples: window k has `context` tokens from k x context on, and the next one.

    Windows ignore the limits of documents. Every token except the split's first is predicted
    exactly once per epoch; an incomplete last window is left out.
    """

    tokens: _SplitTokens
    context: int
    most: int | None = None  # the maximum number of windows, spread evenly over the split
    skipped: int = 0  # windows that other phases have had: they come last in an epoch

    @property
    def num_windows(self) -> int:
        """The number of complete windows in the split."""
        return (len(self.tokens) - 1) // self.context

    def __len__(self) -> int:
        return self.num_windows if self.most is None else min(self.num_windows, self.most)

    def order(self, epoch: int, seed: int) -> Order:
        """Return every window once; a phase begins where the one before ended its first epoch."""
        return np.roll(np.asarray(Samples.order(self, epoch, seed)), -self.skipped)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Mapping[str, Tensor]:
        """Return window `index`: {"tokens": int64 [context + 1]}; nothing is random."""
        window = index * self.num_windows // len(self)
        return {"tokens": self.tokens.read(window * self.context, self.context + 1)}


def open_tokens(dataset: Dataset, split: str) -> _SplitTokens:
    """Open a split; wait only for its own files. UserError if they do not fit the manifest."""
    meta = _text_meta(dataset)
    if split not in meta["splits"]:
        raise UserError(f"the dataset has no split {split!r}; it has {', '.join(meta['splits'])}")
    kind = token_type(meta["vocab_size"])
    listed = {entry["name"] for entry in dataset.manifest["files"]}
    names = sorted(name for name in listed if _is_shard(name, split))
    shards = [_mapped(dataset.file(name), kind) for name in names]
    sizes = [len(shard) for shard in shards]
    expected = meta["splits"][split]["tokens"]
    if sum(sizes) != expected or 0 in sizes or not sizes:
        raise UserError(
            f"split {split} has {sum(sizes)} tokens in {len(names)} files, but its manifest says "
            f"{expected}; make the dataset again"
        )
    return _SplitTokens(
        split=split,
        shards=shards,
        starts=[0, *accumulate(sizes)][:-1],
        names=names,
        vocab_size=meta["vocab_size"],
        end_of_text=meta["end_of_text"],
    )


def token_samples(
    dataset: Dataset, split: str, context: int, most: int | None = None, skipped: int = 0
) -> _TokenSamples:
    """Return the windows of a split, at most `most`; UserError if it has none."""
    tokens = open_tokens(dataset, split)
    if too_short := length_refusals({split: {"tokens": len(tokens)}}, context):
        raise UserError(too_short[0])
    return _TokenSamples(tokens=tokens, context=context, most=most, skipped=skipped)


def length_refusals(splits: Mapping[str, Mapping[str, int]], context: int) -> list[str]:
    """Return a refusal for each split that is too short for a window."""
    return [
        f"split {name} has {split['tokens']} tokens, but a window takes {context + 1}; bring more "
        f"text, or pass --override context={max(1, split['tokens'] - 1)} or less"
        for name, split in splits.items()
        if split["tokens"] <= context
    ]


def vocabulary_refusals(meta: Mapping[str, Any], vocab_size: int) -> list[str]:
    """Return why a model with `vocab_size` rows cannot or should not train on this dataset."""
    there = int(meta.get("vocab_size", vocab_size))
    fix = (
        f"pass --override vocab_size={there}, or make the dataset with --override "
        f"vocab_size={vocab_size}"
    )
    if there > vocab_size:
        return [
            f"the dataset's vocabulary has {there} tokens, the model's only {vocab_size}; {fix}"
        ]
    if there < _LEAST_SHARE_USED * vocab_size:
        return [
            f"the dataset's vocabulary has {there} tokens, so most of the model's {vocab_size} "
            f"would never occur; {fix}"
        ]
    return []


def _text_meta(dataset: Dataset) -> Mapping[str, Any]:
    meta = dataset.meta
    if not {"vocab_size", "end_of_text", "splits"} <= meta.keys():
        raise UserError(f"this dataset has no tokens, so it is not a text dataset; {_MAKE_ONE}")
    return meta


def _is_shard(name: str, split: str) -> bool:
    return name.startswith(f"{split}-") and name.endswith(".bin")


def _mapped(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    num_bytes = path.stat().st_size
    if num_bytes == 0 or num_bytes % kind.itemsize:
        raise UserError(
            f"{path} has {num_bytes} bytes, which are not tokens of {kind.itemsize} bytes; "
            "make the dataset again"
        )
    return np.memmap(path, dtype=kind, mode="r")
