"""Windows of tokens: each token once, across shards; what does not fit together is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.errors import UserError
from training.durable.store.local_dataset import LocalDataset
from training.engine.batches import BatchPlan
from training.preflight.standalone import standalone_inputs
from training.workload import Samples
from training.workloads.growth.config import GrowthConfig
from training.workloads.growth.growth_workload import GROWTH
from training.workloads.growth.text.text_dataset import _write_tokens
from training.workloads.growth.text.tokens import (
    open_tokens,
    token_samples,
    token_type,
    vocabulary_refusals,
)

RNG = torch.Generator()


def dataset(
    folder: Path, tokens: list[int], *, shard_tokens: int = 7, vocab_size: int = 50
) -> LocalDataset:
    """A dataset of these tokens alone; 0 ends a document."""
    folder.mkdir(exist_ok=True)
    values = np.array(tokens, dtype=token_type(vocab_size))
    _write_tokens(folder, "train", 0, values, shard_tokens=shard_tokens)
    splits = {"train": {"tokens": len(tokens), "documents": tokens.count(0), "bytes": 0}}
    meta = {"vocab_size": vocab_size, "end_of_text": 0, "splits": splits}
    return LocalDataset.complete(folder, "growth", meta)


def test_some_windows_are_spread_evenly_over_the_split(tmp_path: Path) -> None:
    data = dataset(tmp_path, [number % 50 for number in range(41)])
    for most, expected in (
        (3, [0, 12, 24]),
        (10, list(range(0, 40, 4))),
        (99, list(range(0, 40, 4))),
    ):
        samples = token_samples(data, "train", 4, most=most)
        firsts = [int(samples.get(k, 0, RNG)["tokens"][0]) for k in range(len(samples))]
        assert firsts == expected


@pytest.mark.parametrize("count", [15, 14, 21, 22, 50])
def test_every_token_but_the_first_is_predicted_once(tmp_path: Path, count: int) -> None:
    tokens = [number % 50 for number in range(count)]
    data = dataset(tmp_path, tokens)
    samples = token_samples(data, "train", context=4)
    assert len(samples) == (count - 1) // 4
    windows = [samples.get(k, 0, RNG)["tokens"] for k in range(len(samples))]
    assert all(window.dtype == torch.int64 and window.shape == (5,) for window in windows)
    assert [int(window[0]) for window in windows] == tokens[: len(samples) * 4 : 4]
    predicted = torch.cat([window[1:] for window in windows]).tolist()
    assert predicted == tokens[1 : len(samples) * 4 + 1]
    batch = samples.collate([samples.get(k, 0, RNG) for k in (1, 0)])
    assert batch["tokens"].tolist() == [windows[1].tolist(), windows[0].tolist()]
    assert sorted(samples.order(0, 1)) == list(range(len(samples)))


def test_tokens_are_read_across_any_number_of_shards(tmp_path: Path) -> None:
    data = dataset(tmp_path, list(range(23)), shard_tokens=3)
    tokens = open_tokens(data, "train")
    assert [len(shard) for shard in tokens.shards] == [3] * 7 + [2]
    for first in range(24):
        for count in (0, 1, 3, 4, 23):
            assert tokens.read(first, count).tolist() == list(range(23))[first : first + count]


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    data = dataset(tmp_path, [70_000, 3, 0], vocab_size=70_001)
    assert (tmp_path / "train-00000.bin").stat().st_size == 12
    assert open_tokens(data, "train").read(0, 3).tolist() == [70_000, 3, 0]
    assert token_type(1 << 16).itemsize == 2


def test_what_stood_behind_a_write_is_gone(tmp_path: Path) -> None:
    """As after an interruption: written, not yet recorded, written again."""
    _write_tokens(tmp_path, "train", 0, np.arange(6, dtype="<u2"), shard_tokens=4)
    _write_tokens(tmp_path, "train", 2, np.array([9], dtype="<u2"), shard_tokens=4)
    assert np.fromfile(tmp_path / "train-00000.bin", "<u2").tolist() == [0, 1, 9]
    _write_tokens(tmp_path, "train", 3, np.array([8, 7], dtype="<u2"), shard_tokens=4)
    assert np.fromfile(tmp_path / "train-00000.bin", "<u2").tolist() == [0, 1, 9, 8]
    assert np.fromfile(tmp_path / "train-00001.bin", "<u2").tolist() == [7]


def test_prompts_are_the_first_tokens_of_documents_that_are_longer(tmp_path: Path) -> None:
    long = [1 + number % 49 for number in range(70_000)]
    tokens = [5, 6, 7, 0, 8, 9, 0, 1, 2, 3, 4, 0, 0, *long, 0]
    opened = open_tokens(dataset(tmp_path, tokens, shard_tokens=40_000), "train")
    found = [prompt.tolist() for prompt in opened.beginnings(5, 2)]
    assert found == [[5, 6], [1, 2], [1, 2]]
    assert [p.tolist() for p in opened.beginnings(1, 3)] == [[1, 2, 3]]


def test_fails_for_files_that_do_not_fit_the_manifest(tmp_path: Path) -> None:
    data = dataset(tmp_path / "a", list(range(10)))
    data.manifest["meta"]["splits"]["train"]["tokens"] = 11
    with pytest.raises(UserError, match=r"has 10 tokens in 2 files, but its manifest says 11"):
        open_tokens(data, "train")
    with pytest.raises(UserError, match="no split 'test'; it has train"):
        open_tokens(data, "test")
    odd = dataset(tmp_path / "b", list(range(10)))
    with (tmp_path / "b" / "train-00001.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="has 7 bytes, which are not tokens of 2 bytes"):
        open_tokens(odd, "train")
    wrong = token_samples(dataset(tmp_path / "c", [1, 2, 60, 3, 4]), "train", context=4)
    with pytest.raises(UserError, match=r"train-00000\.bin has the token 60 near position 0"):
        wrong.get(0, 0, RNG)


def test_fails_for_text_shorter_than_a_window_and_for_what_is_no_text(tmp_path: Path) -> None:
    data = dataset(tmp_path / "a", list(range(4)))
    assert len(token_samples(data, "train", context=3)) == 1
    with pytest.raises(UserError, match="has 4 tokens, but a window takes 5; bring more text"):
        token_samples(data, "train", context=4)
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "x").write_text("x")
    clips = LocalDataset.complete(tmp_path / "clips", "trajectory", {"classes": []})
    with pytest.raises(UserError, match="so it is not a text dataset; make one with"):
        open_tokens(clips, "train")


def test_a_vocabulary_of_another_size_is_a_sentence(tmp_path: Path) -> None:
    data = dataset(tmp_path, [1, 2], vocab_size=300)
    assert vocabulary_refusals(data.meta, 300) == vocabulary_refusals(data.meta, 600) == []
    (small,) = vocabulary_refusals(data.meta, 299)
    assert "has 300 tokens, the model's only 299; pass --override vocab_size=300" in small
    (large,) = vocabulary_refusals(data.meta, 50257)
    assert "most of the model's 50257 would never occur" in large


def test_fails_to_read_text_of_another_vocabulary_than_the_model_s(tmp_path: Path) -> None:
    data = dataset(tmp_path, list(range(40)) * 9, vocab_size=300)

    def samples(vocab_size: int) -> Samples:
        config = GrowthConfig(vocab_size=vocab_size)
        inputs = replace(standalone_inputs("dense", config), dataset=data)
        return GROWTH.stages(config)[0].samples(inputs, "train")

    assert len(samples(300)) == 2
    with pytest.raises(UserError, match="has 300 tokens, the model's only 299; pass --override"):
        samples(299)


def test_each_phase_goes_on_with_the_text_where_the_one_before_it_ended(tmp_path: Path) -> None:
    data = dataset(tmp_path, [number % 50 for number in range(4 * 100 + 1)])  # 100 windows
    c = GrowthConfig(vocab_size=50, context=4, dense_steps=1, experts_steps=3, grown_steps=2)
    inputs = replace(standalone_inputs("dense", c), dataset=data)
    seen: list[int] = []
    for stage in GROWTH.stages(c):
        plan = BatchPlan(stage.samples(inputs, "train"), stage.settings, c.seed, 1)
        assert sorted(plan.rest_of_epoch(0).tolist()) == list(range(100))
        seen += [number for step in range(plan.num_steps) for number in plan.ids(step).tolist()]
    assert len(seen) == len(set(seen)) == 96
    # A text that is shorter than the run begins again.
    *_, grown = GROWTH.stages(replace(c, dense_steps=40))
    assert sorted(grown.samples(inputs, "train").order(0, c.seed)) == list(range(100))
