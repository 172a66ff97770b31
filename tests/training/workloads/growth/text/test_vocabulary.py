"""Tokens are turned into text as the tokenizer library does it, without the library."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import UserError
from training.workloads.growth.text.tokens import read_vocabulary, train_tokenizer

TEXTS = ["Once upon a time, the fox ran: Grüße 你好 🦊\n\n\ttab  and spaces ", "a a a\x00\x7f\xa0"]


def test_any_tokens_give_the_library_s_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXTS], 320)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(tmp_path / "tokenizer.json")
    assert len(vocabulary) == tokenizer.get_vocab_size()
    assert vocabulary.text([vocabulary.end_of_text]) == "<|endoftext|>"
    for text in TEXTS:
        assert vocabulary.text(tokenizer.encode(text).ids) == text
    rng = random.Random(0)
    for _ in range(200):
        tokens = [rng.randrange(len(vocabulary)) for _ in range(20)]
        assert vocabulary.text(tokens) == tokenizer.decode(tokens, skip_special_tokens=False)
    # A row of the model that stands for no token.
    assert vocabulary.text([len(vocabulary) + 5]) == "\ufffd"


def test_the_same_text_gives_the_same_tokenizer_in_every_process(tmp_path: Path) -> None:
    code = (
        "from training.workloads.growth.text.tokens import train_tokenizer\n"
        "texts = [f'{n} words of {n * n} texts' for n in range(400)]\n"
        "print(train_tokenizer([texts], 600).to_str(), hash('words'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()
    there, _, hashed = found.rpartition(" ")
    assert int(hashed) != hash("words")
    here = train_tokenizer([[f"{n} words of {n * n} texts" for n in range(400)]], 600)
    assert here.to_str() == there
    assert here.get_vocab_size() == 600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is not a tokenizer.json ("),
        ("[]", "is not a tokenizer.json ("),
        ('{"model": {"type": "Unigram", "vocab": []}}', "has a model Unigram and a decoder None"),
        (
            '{"model": {"type": "BPE", "vocab": {"\u4f60": 0}}, "decoder": {"type": "ByteLevel"}}',
            "has a token with the character '\u4f60', which does not stand for a byte",
        ),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}',
            "has no token <|endoftext|>",
        ),
    ],
)
def test_fails_for_another_kind_of_tokenizer(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as caught:
        read_vocabulary(tmp_path / "tokenizer.json")
    assert message in str(caught.value)
