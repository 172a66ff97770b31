"""Turns text into tokens where a dataset is made: the package tokenizers, never on an instance.

A tokenizer is the user's (tokenizer.json, or GPT-2's vocab.json and merges.txt) or is trained here
on the text: a byte-level BPE like GPT-2's, so that every text can be written and read back.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from training.errors import UserError
from training.workloads.growth.text.vocabulary import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

# 256 bytes and the end of text.
SMALLEST_VOCABULARY = 257
# What GPT-2's files are called by transformers, and by OpenAI.
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def train_tokenizer(texts: Iterable[Sequence[str]], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE on batches of texts; smaller if nothing is left to merge."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size is {vocab_size}; give at least {SMALLEST_VOCABULARY} (256 bytes and "
            f"{END_OF_TEXT})"
        )
    _check_package()
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # Sorted: the library returns a set.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def load_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a tokenizer.json, or of a folder with it or with GPT-2's two files."""
    _check_package()
    from tokenizers import Tokenizer

    if path.is_dir() and not (path / "tokenizer.json").is_file():
        pair = next((p for p in _PAIRS if all((path / name).is_file() for name in p)), None)
        if pair is None:
            raise UserError(
                f"{path} has no tokenizer.json, nor vocab.json with merges.txt; give a folder "
                "that has"
            )
        tokenizer = _loaded(path, lambda: _of_pair(path / pair[0], path / pair[1]))
    else:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"the tokenizer {file} does not exist; give a tokenizer.json")
        tokenizer = _loaded(file, lambda: Tokenizer.from_file(str(file)))
    # Left over from what it was used for; documents must not be cut or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise UserError(
            f"{path} has no token {END_OF_TEXT}, which ends each document; give a tokenizer with it"
        )
    return tokenizer


def encode(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Tokenize texts on all cores; the name of a special token is only text in it."""
    tokenizer.encode_special_tokens = True
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.asarray(each.ids, dtype=np.int64) for each in found]


def _byte_level(model: "models.BPE") -> "Tokenizer":
    """A tokenizer as GPT-2's: words with the space before them, and any byte."""
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
    except Exception as error:  # the library, which is Rust, raises nothing more precise
        raise UserError(f"{path} is not a tokenizer ({error}); give another") from error


def _check_package() -> None:
    if find_spec("tokenizers") is None:
        raise UserError(
            "text is tokenized with the package tokenizers, which is not installed; make the "
            "dataset where it is (`pip install tokenizers`), and upload it"
        )
