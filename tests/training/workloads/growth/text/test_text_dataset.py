"""Text becomes token shards: read back as it was, resumed where it was interrupted."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from contract.errors import UserError
from contract.keys import UNFINISHED
from training.durable.dataset_output import FolderOutput
from training.durable.sources import ImportSource
from training.durable.store.local_dataset import LocalDataset
from training.workloads.growth.text import text_dataset as dataset_module
from training.workloads.growth.text.stories import STORY_BYTES, write_story
from training.workloads.growth.text.text_dataset import TextOptions, import_dataset, make_dataset
from training.workloads.growth.text.tokens import (
    TOKENIZER_FILE,
    open_tokens,
    read_vocabulary,
    train_tokenizer,
)

SMALL = TextOptions(vocab_size=300, held_out_of=5)
TEXTS = [f"Story {n}: 你好, {'the fox ' * (n % 4)}ran. 🦊" for n in range(23)]


def source(folder: Path, texts: list[str] = TEXTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stories.txt").write_text("<|endoftext|>".join(texts))
    return folder


def imported(path: Path, out: Path, options: TextOptions = SMALL, seed: int = 0) -> LocalDataset:
    out.mkdir(exist_ok=True)
    files = ImportSource(path, out.parent / "scratch").files()
    meta = import_dataset(files, out, seed, lambda done, total: None, options)
    return LocalDataset.complete(out, "growth", meta)


def texts_of(data: LocalDataset, split: str) -> list[str]:
    """A split's documents, read back."""
    tokens = open_tokens(data, split)
    read = tokens.read(0, len(tokens)).tolist()
    ends = [-1, *(n for n, token in enumerate(read) if token == tokens.end_of_text)]
    assert ends[-1] == len(read) - 1, "each document is ended"
    vocabulary = read_vocabulary(data.file(TOKENIZER_FILE))
    return [vocabulary.text(read[a + 1 : b]) for a, b in pairwise(ends)]


def test_text_comes_back_as_it_was_and_one_document_of_five_is_held_out(tmp_path: Path) -> None:
    data = imported(source(tmp_path / "own"), tmp_path / "out")
    train, validation = texts_of(data, "train"), texts_of(data, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    places = [TEXTS.index(text) for text in validation]
    assert [place // 5 for place in places] == list(range(len(places)))
    assert len(places) in (4, 5)
    assert len({place % 5 for place in places}) > 1, "not always the same one of five"
    split = data.meta["splits"]["train"]
    assert split["documents"] == len(train)
    assert split["bytes"] == sum(len(text.encode()) for text in train)
    assert data.meta["vocab_size"] == 300 == len(read_vocabulary(data.file(TOKENIZER_FILE)))
    assert [entry["name"] for entry in data.manifest["files"]] == [
        "tokenizer.json",
        "train-00000.bin",
        "validation-00000.bin",
    ]
    other = imported(tmp_path / "own", tmp_path / "other", seed=1)
    assert texts_of(other, "validation") != validation


def test_folders_of_splits_are_kept(tmp_path: Path) -> None:
    for split, text in (("train", "learn this"), ("valid", "and hold this out"), ("test", "last")):
        source(tmp_path / "own" / split, [text])
    data = imported(tmp_path / "own", tmp_path / "out")
    assert texts_of(data, "train") == ["learn this"]
    assert texts_of(data, "validation") == ["and hold this out"]
    assert texts_of(data, "test") == ["last"]
    (tmp_path / "own" / "valid" / "stories.txt").unlink()
    with pytest.raises(UserError, match="valid is empty; add files, or delete it"):
        imported(tmp_path / "own", tmp_path / "again")


def test_files_named_like_splits_are_splits(tmp_path: Path) -> None:
    """As people clone a dataset from Hugging Face; nothing of the test may end up in train."""
    own = tmp_path / "own"
    own.mkdir()
    for name in ("train-00000", "train-00001", "validation", "test"):
        (own / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    data = imported(own, tmp_path / "out")
    assert texts_of(data, "train") == ["train-00000", "train-00001"]
    assert texts_of(data, "validation") == ["validation"]
    assert texts_of(data, "test") == ["test"]
    (own / "validation.jsonl").unlink()
    with pytest.raises(UserError, match="split validation has no files; add some, or use no split"):
        imported(own, tmp_path / "again")
    (own / "more.jsonl").write_text('{"text": "more"}')
    assert "test" not in imported(own, tmp_path / "mixed").meta["splits"]


def test_an_interrupted_import_goes_on_and_ends_with_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_BATCH_CHARACTERS", 60)
    monkeypatch.setattr(dataset_module, "_KEPT_EVERY_BATCHES", 3)
    own, out = source(tmp_path / "own"), tmp_path / "out"
    whole = imported(own, tmp_path / "whole")
    out.mkdir()
    encoded = list[str]()

    def interrupted_after(batches: int) -> None:
        calls = list[int]()

        def progress(done: int, total: int) -> None:
            calls.append(done)
            if len(calls) == batches:
                raise KeyboardInterrupt

        import_dataset(ImportSource(own, tmp_path).files(), out, 0, progress, SMALL)

    for batches in (1, 5):
        with pytest.raises(KeyboardInterrupt):
            interrupted_after(batches)
        assert (out / UNFINISHED).is_file()
    encode = dataset_module.encode
    monkeypatch.setattr(
        dataset_module, "encode", lambda t, texts: encoded.extend(texts) or encode(t, texts)
    )
    resumed = imported(own, out)
    assert resumed.manifest["files"] == whole.manifest["files"]
    assert resumed.meta == whole.meta
    assert 0 < len(encoded) < len(TEXTS), "what was done is not done again"


def test_fails_to_go_on_with_other_text_or_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_BATCH_CHARACTERS", 60)
    monkeypatch.setattr(dataset_module, "_KEPT_EVERY_BATCHES", 1)
    own, out = source(tmp_path / "own"), tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if (out / UNFINISHED).is_file() and json.loads((out / UNFINISHED).read_text())["pieces"]:
            raise KeyboardInterrupt

    out.mkdir()
    with pytest.raises(KeyboardInterrupt):
        import_dataset(ImportSource(own, tmp_path).files(), out, 0, stop, SMALL)
    for seed, options, what in ((1, SMALL, "seed"), (0, TextOptions(vocab_size=301), "options")):
        with pytest.raises(UserError, match=f"unfinished dataset with another {what}; give a new"):
            imported(own, out, options, seed)
    text = (own / "stories.txt").read_text()
    (own / "stories.txt").write_text(text.replace("Story 0", "Story O"))
    with pytest.raises(UserError, match=r"the text has changed since the import into .* began"):
        imported(own, out)


def own_tokenizer(folder: Path, **parts: Any) -> Path:
    tokenizer = train_tokenizer([TEXTS], 280)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_of_one_s_own(tmp_path: Path) -> None:
    folder = own_tokenizer(tmp_path)
    model: Mapping[str, Any] = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "pair" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    tokens = []
    for number, given in enumerate((folder / "tokenizer.json", folder, tmp_path / "pair")):
        options = TextOptions(tokenizer=str(given), held_out_of=5)
        data = imported(source(tmp_path / "own"), tmp_path / f"out{number}", options)
        assert data.meta["vocab_size"] == 280
        assert data.meta["tokenizer"] == given.name
        tokens.append((data.folder / "train-00000.bin").read_bytes())
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_tokenizer_that_was_used_for_short_texts_cuts_and_fills_up_none(tmp_path: Path) -> None:
    folder = own_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(60)
    tokenizer.enable_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = [*TEXTS, "A long story. " * 50]
    options = TextOptions(tokenizer=str(folder), held_out_of=5)
    data = imported(source(tmp_path / "own", texts), tmp_path / "out", options)
    assert sorted(texts_of(data, "train") + texts_of(data, "validation")) == sorted(
        text.strip() for text in texts
    )


def test_fails_for_a_tokenizer_without_all_bytes(tmp_path: Path) -> None:
    known = {chr(byte): byte for byte in range(0x21, 0x7F)} | {"<|endoftext|>": 0x7F, "Ġ": 0x80}
    tokenizer = Tokenizer(models.BPE(known, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = TextOptions(tokenizer=str(tmp_path), held_out_of=5)
    own = source(tmp_path / "own", [f"text {n}" for n in range(20)])
    with pytest.raises(UserError, match="has no token for the byte 0x00, so text with it would be"):
        imported(own, tmp_path / "out", options)


def test_an_import_that_was_stopped_before_it_had_a_tokenizer_trains_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out, write = source(tmp_path / "own"), tmp_path / "out", FolderOutput.write

    def stop(output: FolderOutput, name: str, content: bytes) -> None:
        if name == TOKENIZER_FILE:
            raise KeyboardInterrupt
        write(output, name, content)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(FolderOutput, "write", stop)
        imported(own, out)
    assert (out / UNFINISHED).is_file()
    whole = imported(own, tmp_path / "whole")
    assert imported(own, out).manifest["files"] == whole.manifest["files"]


def test_the_name_of_a_special_token_is_text_where_it_separates_nothing(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    texts = [f"{n} a <|endoftext|> b" for n in range(6)]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "own" / "a.jsonl").write_text(lines)
    data = imported(tmp_path / "own", tmp_path / "out")
    assert sorted(texts_of(data, "train") + texts_of(data, "validation")) == texts


def test_fails_where_later_text_is_changed_by_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first megabyte of a text may have no ligature, fraction or index at all."""
    monkeypatch.setattr(dataset_module, "_BATCH_CHARACTERS", 100)
    options = TextOptions(tokenizer=str(own_tokenizer(tmp_path, normalizer=normalizers.NFKC())))
    own = source(tmp_path / "own", [*TEXTS, "a \ufb01ne one"])
    with pytest.raises(UserError, match=r"changes its text: .* becomes 'fine one'; use one that"):
        imported(own, tmp_path / "out", options)


def test_takes_what_a_tokenizer_only_writes_in_another_form_of_unicode(tmp_path: Path) -> None:
    """Qwen's do: no letter is another one."""
    tokenizer = own_tokenizer(tmp_path, normalizer=normalizers.NFC())
    options = TextOptions(tokenizer=str(tokenizer), held_out_of=5)
    data = imported(source(tmp_path / "own", ["a cafe\u0301 there"] * 6), tmp_path / "out", options)
    assert texts_of(data, "validation")[0] == "a caf\u00e9 there"


def test_a_tokenizer_that_draws_its_merges_always_takes_the_likeliest(tmp_path: Path) -> None:
    path = own_tokenizer(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 0.5
    path.write_text(json.dumps(content))
    options = TextOptions(tokenizer=str(path), held_out_of=5)
    both = [imported(source(tmp_path / "own"), tmp_path / f"{n}", options) for n in range(2)]
    assert both[0].manifest["files"] == both[1].manifest["files"]


def test_a_tokenizer_that_begins_a_text_with_a_token_does_not_where_none_was_trained(
    tmp_path: Path,
) -> None:
    """Llama 3's; transformers, which reads an export's copy, would begin each prompt with it."""
    name = "<|endoftext|>"
    begin = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, 0)])
    own_tokenizer(tmp_path, post_processor=begin)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("ab").ids[0] == 0
    options = TextOptions(tokenizer=str(tmp_path), held_out_of=5)
    imported(source(tmp_path / "own"), tmp_path / "out", options)
    assert 0 not in Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).encode("ab").ids


def test_an_end_of_text_that_was_added_as_a_usual_token_is_text_in_text(tmp_path: Path) -> None:
    path = own_tokenizer(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(content))
    (tmp_path / "a.jsonl").write_text('{"text": "a <|endoftext|> b"}\n' * 6)
    options = TextOptions(tokenizer=str(path), held_out_of=5)
    data = imported(tmp_path / "a.jsonl", tmp_path / "out", options)
    assert texts_of(data, "validation")[0] == "a <|endoftext|> b"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": normalizers.Lowercase()}, "changes its text: 'Story "),
        ({"decoder": decoders.WordPiece()}, "has a model BPE and a decoder WordPiece; give a byte"),
        ({"model": models.WordLevel({"a": 0})}, "has a model WordLevel and a decoder None; give a"),
    ],
)
def test_fails_for_a_tokenizer_that_cannot_be_used(
    tmp_path: Path, parts: Mapping[str, Any], message: str
) -> None:
    if "model" in parts:
        Tokenizer(parts["model"]).save(str(tmp_path / "tokenizer.json"))
    else:
        own_tokenizer(tmp_path, **parts)
    options = TextOptions(tokenizer=str(tmp_path), held_out_of=5)
    with pytest.raises(UserError) as caught:
        imported(source(tmp_path / "own"), tmp_path / "out", options)
    assert message in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == [], "the same folder can be given again"


def test_fails_for_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    own = source(tmp_path / "own")
    (tmp_path / "notes.json").write_text("{}")
    for given, message in (
        (tmp_path / "none.json", "none.json does not exist; give a tokenizer.json"),
        (own, "has neither tokenizer.json nor vocab.json with merges.txt"),
        (tmp_path / "notes.json", "notes.json is not a tokenizer ("),
    ):
        options = TextOptions(tokenizer=str(given), held_out_of=5)
        with pytest.raises(UserError) as caught:
            imported(own, tmp_path / "out", options)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 256}, "vocab_size is 256; give at least 257"),
        ({"tokenizer": "x", "vocab_size": 300}, "give tokenizer or vocab_size"),
        ({"separator": ""}, "separator is empty"),
        ({"held_out_of": 1}, "held_out_of is 1; give at least 2"),
    ],
)
def test_fails_for_options_that_make_no_dataset(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextOptions(**fields)


def test_stories_are_a_function_of_seed_and_number(tmp_path: Path) -> None:
    seen, made = list[tuple[int, int]](), dict[str, LocalDataset]()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        meta = make_dataset(
            tmp_path / name, 60, seed, lambda done, total: seen.append((done, total)), SMALL
        )
        made[name] = LocalDataset.complete(tmp_path / name, "growth", meta)
    assert seen == [(60, 60)] * 3
    assert made["a"].fingerprint == made["b"].fingerprint != made["c"].fingerprint
    stories = {write_story(3, number) for number in range(60)}
    held_out = texts_of(made["a"], "validation")
    assert len(held_out) == 12
    assert set(texts_of(made["a"], "train") + held_out) == stories
    assert sum(map(len, stories)) / 60 == pytest.approx(STORY_BYTES, rel=0.1)


def test_stories_are_english_with_articles_and_capitals() -> None:
    for number in range(300):
        story = write_story(0, number)
        assert "{" not in story
        assert " a old" not in story
        assert " a owl" not in story
        for sentence in story.split(". "):
            assert not sentence[0].islower(), story


def test_fails_for_too_few_stories(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="count is 19; give at least 20 stories"):
        make_dataset(tmp_path, 19, 0, lambda done, total: None)
    with pytest.raises(UserError, match="seed is -1; give 0 or more"):
        make_dataset(tmp_path, 20, -1, lambda done, total: None)
