"""A text dataset as a workload reads it: token shards, memory mapped, cut into windows.

Files: SPLIT-00000.bin, SPLIT-00001.bin ... (little-endian uint16, or uint32 for a vocabulary above
65,536) and tokenizer.json. Documents follow one another, each ended by the end-of-text token.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import UserError
from training import Dataset, Samples

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

    @property
    def num_windows(self) -> int:
        """The number of complete windows in the split."""
        return (len(self.tokens) - 1) // self.context

    def __len__(self) -> int:
        return self.num_windows if self.most is None else min(self.num_windows, self.most)

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
    dataset: Dataset, split: str, context: int, most: int | None = None
) -> _TokenSamples:
    """Return the windows of a split, at most `most`; UserError if it has none."""
    tokens = open_tokens(dataset, split)
    if too_short := length_refusals({split: {"tokens": len(tokens)}}, context):
        raise UserError(too_short[0])
    return _TokenSamples(tokens=tokens, context=context, most=most)


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
