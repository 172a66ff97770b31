"""MAGVIT: codes that come back, causal tokens, tokens as an artifact, a Transformer on them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.training.workloads.trajectory.magvit.scene import SMALL, prior_of, transformer_stage
from tests.training.workloads.trajectory.scene import FakeDataset, inputs_of
from training.settings import changed
from training.workload import Inputs, Partial
from training.workloads.trajectory.clip_dataset import open_dataset
from training.workloads.trajectory.config import MagvitConfig, magvit_full, magvit_laptop
from training.workloads.trajectory.magvit.model import (
    Quantizer,
    Tokenizer,
    _AxialBlock,
    _folded_attention,
    _merge_cells,
    _split_cells,
)
from training.workloads.trajectory.magvit.stages import Tokens, TrainTokenizer, _crop_mask


def test_every_code_comes_back_from_its_values_and_is_reached() -> None:
    quantizer = Quantizer((8, 5, 5, 5))
    codes = torch.arange(quantizer.num_codes)
    values = quantizer.values(codes)
    assert values.abs().max() <= 1.0
    assert torch.equal(quantizer.indices(values), codes)
    torch.manual_seed(0)
    reached = quantizer.indices(quantizer(3.0 * torch.randn(200_000, 4)))
    assert len(reached.unique()) == quantizer.num_codes == 1000


def test_rounding_lets_gradients_through() -> None:
    z = torch.zeros(3, 4, requires_grad=True)
    Quantizer((8, 5, 5, 5))(z).sum().backward()
    assert z.grad is not None and (z.grad > 0.1).all()


@pytest.mark.parametrize("config", [magvit_laptop(), replace(magvit_full(), tokenizer_width=4)])
def test_a_token_sees_no_later_frame(config: MagvitConfig) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer(stem=config.stem, width=8, levels=config.num_levels).eval()
    clip = torch.randint(0, 256, (1, 32, 64, 64, 3), dtype=torch.uint8)
    other = clip.clone()
    other[:, 16:] = 255 - other[:, 16:]
    with torch.no_grad():
        codes, other_codes = tokenizer.encode(clip), tokenizer.encode(other)
    steps, cells = config.token_shape
    assert codes.shape == (1, steps, math.isqrt(cells), math.isqrt(cells), 6)
    assert torch.equal(codes[:, : steps // 2], other_codes[:, : steps // 2])
    assert not torch.equal(codes[:, steps // 2 :], other_codes[:, steps // 2 :])


@pytest.mark.slow  # the laptop's runs
def test_the_recipe_of_a_gpu_runs_a_step_on_the_cpu(dataset: FakeDataset) -> None:
    """The laptop's does in test_waits.py."""
    config = magvit_full()
    for stage in (TrainTokenizer(config=config), transformer_stage(config)):
        torch.manual_seed(0)
        model = stage.model(inputs_of(dataset, config))
        optimizer = stage.optimizer(model)
        loss = stage.loss(model, stage.example(2), 0, 1)
        assert loss.total.isfinite()
        (loss.total if loss.mean is None else loss.total + loss.mean).backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())


def test_steps_on_the_tokenizer_bring_its_clips_closer(dataset: FakeDataset) -> None:
    stage = TrainTokenizer(config=replace(SMALL, tokenizer_learning_rate=5e-3))
    inputs = inputs_of(dataset, stage.config)
    torch.manual_seed(0)
    model = stage.model(inputs)
    optimizer = stage.optimizer(model)
    samples = stage.samples(inputs, "train")
    batch = samples.collate([samples.get(k, 0, torch.Generator()) for k in range(2)])
    losses = []
    for step in range(8):
        loss = stage.loss(model, batch, step, 100).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_tokenizer_is_trained_on_frames_in_a_row_of_each_clip(dataset: FakeDataset) -> None:
    stage = TrainTokenizer(config=replace(SMALL, tokenizer_frames=8))
    samples = stage.samples(inputs_of(dataset, stage.config), "train")
    batch, seen = samples.collate([0, 1]), []

    def model(frames: torch.Tensor) -> tuple[torch.Tensor, None]:
        seen.append(frames)
        return frames.float() / 255.0, None

    assert all(stage.loss(model, batch, step, 40).total == 0.0 for step in range(40))  # type: ignore[arg-type]
    windows = [batch["frames"][:, start : start + 8] for start in range(0, 25, 4)]
    found = [[torch.equal(each, window) for window in windows].index(True) for each in seen]
    assert found == [step % 7 for step in range(40)]


def test_tokens_are_the_same_in_shards_and_at_once(inputs: Inputs, dataset: FakeDataset) -> None:
    config = replace(inputs.config, num_shards=1)
    at_once = Tokens(config=config).make(inputs_of(dataset, config, prior=inputs.prior), 0)
    in_shards = torch.cat([shard["tokens"] for shard in inputs.artifact("tokens")])
    assert in_shards.shape == (66, 17, 256) and in_shards.dtype == torch.int32
    assert torch.equal(at_once["tokens"], in_shards)


def test_the_key_of_tokens_names_the_weights_of_the_tokenizer(inputs: Inputs) -> None:
    stage = Tokens(config=inputs.config)
    other = replace(inputs, prior=prior_of(inputs.config, seed=1))
    assert stage.key(inputs) == stage.key(inputs) != stage.key(other)


def test_the_crop_is_a_square_around_the_ball() -> None:
    tracks = torch.tensor([[[10.0, 20.0, 2.0]]])
    mask = _crop_mask(tracks, 64, 64)[0, 0, :, :, 0]
    rows, columns = mask.nonzero().T
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (17, 22, 7, 12)
    assert mask.sum() == 36


def test_psnr_and_code_perplexity_are_what_their_definitions_say(tmp_path: Path) -> None:
    codes = torch.arange(16).repeat(5)
    sums = {"squared": (0.01 * 400, 400.0), "squared_crop": (0.04 * 50, 50.0)}
    sums["squared_mean_crop"] = (0.1 * 50, 50.0)
    empty = torch.zeros(0, 6, 64, 64, 3, dtype=torch.uint8)
    part = Partial(sums=sums, tensors={"codes": codes, "truth": empty, "reconstructed": empty})
    metrics = TrainTokenizer(config=SMALL).summarize([part, part], tmp_path)
    assert metrics["psnr"] == pytest.approx(20.0)
    assert metrics["psnr_ball"] == pytest.approx(10.0 * math.log10(25.0))
    assert metrics["mean_image_psnr_ball"] == pytest.approx(10.0)
    assert metrics["code_perplexity"] == pytest.approx(16.0)


def test_a_perfect_tokenizer_would_have_no_error_in_the_crop(
    dataset: FakeDataset, tmp_path: Path
) -> None:
    stage = TrainTokenizer(config=SMALL)
    inputs = inputs_of(dataset, SMALL)
    samples = stage.samples(inputs, "validation")
    batch = samples.collate([samples.get(k, 0, torch.Generator()) for k in range(3)])

    class Perfect(Tokenizer):
        def forward(self, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return clips.float() / 255.0, self.encode(clips)

    model = Perfect(stem="patch", width=8, levels=(8, 5, 5, 5)).eval()
    with torch.no_grad():
        part = stage.evaluate(model, batch)
    assert part.sums["squared_crop"][0] == pytest.approx(0.0, abs=1e-6)
    assert len(part.tensors["codes"]) == 3 * 16 * 256
    assert torch.equal(part.tensors["truth"], part.tensors["reconstructed"])
    stage.show(model, inputs, [part], tmp_path)
    assert (tmp_path / "reconstructions.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stem", "none"),
        ("levels", "8,x"),
        ("levels", "8,1"),
        ("levels", ",".join(8 * ["16"])),
        ("tokenizer_frames", 6),
        ("tokenizer_frames", 36),
        ("temperature", -0.1),
        ("width", 62),
        ("masked_share", 1.0),
        ("epochs", 0),
        ("motion_weight", -1.0),
        ("baseline_width", 20),
        ("learning_rate", 0.0),
        ("tokenizer_learning_rate", -1e-3),
        ("dropout", 1.0),
        ("precision", "float16"),
    ],
)
def test_fails_on_a_config_value_that_cannot_work(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        changed(magvit_laptop(), **{name: value})


def test_cells_that_are_merged_are_squares_and_come_back() -> None:
    cells = torch.arange(2 * 3 * 16).view(2, 3, 16, 1)
    places = _merge_cells(cells, 2)
    assert places.shape == (2, 3, 4, 4)
    # The first place of a 4x4 grid is its upper left square.
    assert places[0, 0, 0].tolist() == [0, 1, 4, 5]
    assert torch.equal(_split_cells(places, 2), cells)
    assert torch.equal(_merge_cells(cells, 1), cells)


def test_the_two_stems_have_the_tokens_that_they_say() -> None:
    assert magvit_laptop().token_shape == (16, 256)
    assert magvit_full().token_shape == (8, 64)


def test_clips_of_a_sample_are_those_of_the_file(dataset: FakeDataset) -> None:
    samples = TrainTokenizer(config=SMALL).samples(inputs_of(dataset, SMALL), "test")
    data = open_dataset(dataset.folder)
    batch = samples.collate([samples.get(k, 0, torch.Generator()) for k in (0, 2)])
    clips = [data.splits["test"][0], data.splits["test"][2]]
    assert batch["clips"].tolist() == clips
    assert torch.equal(batch["frames"], torch.from_numpy(data.frames[clips]))


def test_attention_in_four_dimensions_takes_the_fast_kernel_and_differs_by_rounding() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 5, 4, 16, 8, requires_grad=True)
    plain = F.scaled_dot_product_attention(*qkv.unbind(0))
    folded = _folded_attention(*qkv.unbind(0))
    assert torch.allclose(folded, plain, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(out.square().sum(), qkv)[0] for out in (folded, plain))
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    math = SDPBackend.MATH.value
    assert torch._fused_sdp_choice(*qkv.unbind(0)) == math
    assert torch._fused_sdp_choice(*qkv.flatten(1, 2).unbind(0)) != math


@pytest.mark.gpu
def test_attention_on_a_gpu_needs_no_plain_formula() -> None:
    torch.manual_seed(0)
    block, x_BtPE = _AxialBlock(width=64, num_heads=4, dropout=0.0), torch.randn(2, 8, 16, 64)
    expected = block(x_BtPE)
    block = block.to("cuda", torch.bfloat16)
    fast = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(fast):
        found = block(x_BtPE.to("cuda", torch.bfloat16))
        found.sum().backward()
    assert torch.allclose(found.float().cpu(), expected, rtol=0.05, atol=0.05)
