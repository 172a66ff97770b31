"""MAGVIT: codes that come back, causal tokens, tokens as an artifact, a Transformer on them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.training.workloads.trajectory.scene import FakeDataset, inputs_of
from training.settings import changed
from training.workload import Inputs, Partial, Prior
from training.workloads.trajectory.clips import CLASSES
from training.workloads.trajectory.config import MagvitConfig, magvit_full, magvit_laptop
from training.workloads.trajectory.dataset import open_dataset
from training.workloads.trajectory.magvit.generation import (
    TrainTransformer,
    _digits_loss,
    _generated,
    _hidden,
)
from training.workloads.trajectory.magvit.model import (
    Quantizer,
    Tokenizer,
    TokenTransformer,
    _AxialBlock,
    _draw,
    _folded_attention,
    _merge_cells,
    _split_cells,
    crop_mask,
)
from training.workloads.trajectory.magvit.stages import Tokens, TrainTokenizer, _blended
from training.workloads.trajectory.workload import TRAJECTORY

SMALL = replace(magvit_laptop(), tokenizer_width=8, width=16, num_layers=1, num_heads=2)


def transformer_stage(config: MagvitConfig) -> TrainTransformer:
    (stage,) = [s for s in TRAJECTORY.stages(config) if s.name == "transformer"]
    assert isinstance(stage, TrainTransformer)
    return stage


def prior_of(config: MagvitConfig, seed: int = 0) -> Prior:
    torch.manual_seed(seed)
    model = Tokenizer(
        stem=config.stem, width=config.tokenizer_width, levels=config.num_levels
    ).state_dict()
    return Prior(stage="tokenizer", step=1, model=model, metrics={}, optimizer=dict)


@pytest.fixture(scope="module")
def inputs(dataset: FakeDataset) -> Inputs:
    config = replace(SMALL, num_shards=3)
    prior = prior_of(config)
    stage = Tokens(config=config)
    shards = [stage.make(inputs_of(dataset, config, prior=prior), shard) for shard in range(3)]
    return inputs_of(dataset, config, {"tokens": shards}, prior)


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
    assert codes.shape == (1, steps, math.isqrt(cells), math.isqrt(cells), 5)
    assert torch.equal(codes[:, : steps // 2], other_codes[:, : steps // 2])
    assert not torch.equal(codes[:, steps // 2 :], other_codes[:, steps // 2 :])


@pytest.mark.parametrize("recipe", [magvit_laptop, magvit_full])
def test_each_recipe_runs_a_step_on_the_cpu(dataset: FakeDataset, recipe: Any) -> None:
    config: MagvitConfig = recipe()
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


def test_tokens_are_the_same_in_shards_and_at_once(inputs: Inputs, dataset: FakeDataset) -> None:
    config = replace(inputs.config, num_shards=1)
    at_once = Tokens(config=config).make(inputs_of(dataset, config, prior=inputs.prior), 0)
    in_shards = torch.cat([shard["tokens"] for shard in inputs.artifact("tokens")])
    assert in_shards.shape == (66, 17, 256) and in_shards.dtype == torch.int16
    assert torch.equal(at_once["tokens"], in_shards)


def test_the_key_of_tokens_names_the_weights_of_the_tokenizer(inputs: Inputs) -> None:
    stage = Tokens(config=inputs.config)
    other = replace(inputs, prior=prior_of(inputs.config, seed=1))
    assert stage.key(inputs) == stage.key(inputs) != stage.key(other)


def batch_of(inputs: Inputs, split: str, num: int) -> dict[str, torch.Tensor]:
    samples = transformer_stage(inputs.config).samples(inputs, split)
    return samples.collate([samples.get(k, 0, torch.Generator()) for k in range(num)])


def model_of(inputs: Inputs) -> TokenTransformer:
    """Newly initialised, with the tokenizer that was trained before."""
    stage = transformer_stage(inputs.config)
    torch.manual_seed(0)
    model = stage.model(inputs).eval()
    assert isinstance(model, TokenTransformer)
    stage.start(model, inputs)
    return model


def test_the_transformer_guesses_what_is_hidden_only(inputs: Inputs) -> None:
    model, tokens = model_of(inputs), batch_of(inputs, "train", 3)["x"]
    hidden = torch.zeros((2, 16, 256), dtype=torch.bool)
    hidden[1, 3:5] = hidden[1, -1] = True
    hinted, classes = torch.tensor([False, True]), torch.tensor([11, 4])
    logits, future, places, guesses = model(tokens, hidden, hinted, classes)
    assert logits.shape == (3, len(CLASSES)) and future.shape == (3, 2)
    assert places.shape == (3, 32, 2) and guesses.shape == (2, 16, 256, 8 + 8 + 8 + 6 + 5)
    # What is hidden is not seen: another code there changes nothing; the hint and the class do.
    changed = tokens.clone()
    changed[1, 3:5] = (changed[1, 3:5] + 5000) % 15360
    assert torch.equal(model(changed, hidden, hinted, classes)[3], guesses)
    changed[1, -1] = (changed[1, -1] + 5000) % 15360
    assert not torch.allclose(model(changed, hidden, hinted, classes)[3], guesses)
    assert torch.equal(
        model(changed, hidden, ~hinted, classes)[3], model(tokens, hidden, ~hinted, classes)[3]
    )
    assert not torch.allclose(model(tokens, hidden, hinted, classes - 1)[3], guesses)
    whole = model(tokens)
    assert len(whole) == 3 and torch.allclose(whole[0][2], logits[2], atol=1e-6)


def test_the_transformer_keeps_the_tokenizer_as_it_was_trained(inputs: Inputs) -> None:
    model, prior = model_of(inputs), inputs.prior
    assert prior is not None
    optimizer = transformer_stage(inputs.config).optimizer(model)
    loss = transformer_stage(inputs.config).loss(model, batch_of(inputs, "train", 4), 0, 1)
    (loss.total + loss.mean).backward()
    optimizer.step()
    kept = model.tokenizer.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in prior.model.items())
    codes = batch_of(inputs, "train", 1)["x"][:, :-1]
    values = model.quantizer.values(codes.long()).view(1, 16, 16, 16, 5)
    drawn = model.tokenizer.decode(values).clamp(0.0, 1.0) * 255.0
    assert model.draw(codes).dtype == torch.uint8
    assert (model.draw(codes).float() - drawn).abs().max() <= 0.5


def test_decoding_fills_in_what_is_hidden_and_changes_nothing_else(inputs: Inputs) -> None:
    model, tokens = model_of(inputs), batch_of(inputs, "train", 2)["x"]
    hidden = torch.zeros((2, 16, 256), dtype=torch.bool)
    hidden[0, 8:] = True
    hidden[1, 3, :7] = True
    seen = []
    forward = TokenTransformer.forward

    def watched(self: TokenTransformer, *given: Any) -> Any:
        seen.append(int(given[1].sum()))
        return forward(self, *given)

    told = torch.zeros(2, dtype=torch.bool), torch.tensor([11, 11])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenTransformer, "forward", watched)
        codes = model.decode(tokens, hidden, *told)
    assert torch.equal(codes[~hidden], tokens[:, :-1].long()[~hidden])
    assert codes.min() >= 0 and codes.max() < 15360
    assert (codes[hidden] != tokens[:, :-1].long()[hidden]).float().mean() > 0.9
    # Twelve steps, each with less to fill in, by the cosine.
    assert len(seen) == 12 and seen[0] == int(hidden.sum())
    assert seen[6] == int(2048 * math.cos(math.pi / 4)) + int(7 * math.cos(math.pi / 4))
    assert sorted(seen, reverse=True) == seen and seen[-1] < 0.15 * seen[0]


def test_a_code_is_drawn_as_often_as_it_is_likely() -> None:
    torch.manual_seed(0)
    quantizer = Quantizer((3, 2))
    shares = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.8])
    guesses = torch.cat([share.log() for share in shares]).expand(1, 1, 20_000, 5)
    codes, sure = _draw(quantizer, guesses)
    expected = (shares[1][:, None] * shares[0]).flatten()
    assert (codes.flatten().bincount(minlength=6) / 20_000 - expected).abs().max() < 0.01
    assert torch.allclose(sure, expected.log()[codes], atol=1e-5)


def test_what_is_hidden_follows_the_task() -> None:
    torch.manual_seed(0)
    hidden, hinted = _hidden(torch.zeros((3000, 8, 64), dtype=torch.long))
    assert 0.3 < hinted.float().mean() < 0.37
    # Of a clip that is interpolated the first step is given, of others some steps or none.
    assert not hidden[hinted][:, 0].any() and hidden[hinted][:, 1].any()
    first = (hidden[~hinted].float().mean(dim=2) > 0).float().argmax(dim=1)
    assert 0.4 < (first == 0).float().mean() < 0.6 and first.max() == 7


def test_between_the_ends_of_a_blended_clip_one_fades_into_the_other() -> None:
    clip = torch.zeros((1, 32, 2, 2, 3), dtype=torch.uint8)
    clip[:, 2:-2] = 77
    clip[:, -2:] = 232
    blended = _blended(clip, 2)
    assert blended[0, :, 0, 0, 0].tolist() == [0, 0, *range(8, 232, 8), 232, 232]


def test_the_loss_of_the_transformer_masks_a_share_of_the_clips(inputs: Inputs) -> None:
    stage = transformer_stage(inputs.config)
    seen = []
    forward = TokenTransformer.forward

    def watched(self: TokenTransformer, *given: Any) -> Any:
        seen.append(given[1:])
        return forward(self, *given)

    batch = batch_of(inputs, "train", 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenTransformer, "forward", watched)
        loss = stage.loss(model_of(inputs), batch, 0, 1)
    ((masked, _, classes),) = seen
    num_masked = int(6 * stage.config.masked_share)
    assert len(masked) == len(classes) == num_masked and masked.any()
    assert torch.isin(classes, torch.cat([batch["labels"], torch.tensor([11])])).all()
    guess, count = loss.metrics["masked_loss"]
    # Untrained, each of 15,360 codes is about as likely: ln 15360 = 9.6.
    assert count == 1.0 and 8.6 < float(guess) < 11.6
    assert loss.mean is not None
    assert loss.mean.item() == pytest.approx(stage.config.masked_weight * float(guess), rel=1e-4)


def test_an_evaluation_compares_what_is_predicted_with_the_last_frame(
    inputs: Inputs, tmp_path: Path
) -> None:
    stage = transformer_stage(inputs.config)
    model, batch = model_of(inputs), batch_of(inputs, "validation", 11)
    with torch.no_grad():
        part = stage.evaluate(model, batch)
    metrics = stage.summarize([part], tmp_path)
    clips, tracks = batch["strips"].float() / 255.0, open_dataset(inputs.dataset.folder).tracks
    squared = (clips[:, 24:] - clips[:, 23:24]).square().mean()
    assert metrics["copied_psnr"] == pytest.approx(-10.0 * math.log10(squared), rel=1e-4)
    of_clips = torch.from_numpy(tracks[batch["strip_clips"].tolist()])[:, :-1, :2]
    away = (of_clips[:, 24:] - of_clips[:, 23:24]).norm(dim=2).mean()
    assert metrics["copied_ball_error_pixels"] == pytest.approx(float(away), rel=1e-4)
    assert metrics["predicted_psnr"] < 20.0 and metrics["predicted_ball_error_pixels"] > 5.0
    with torch.no_grad():
        stage.show(model, inputs, [part], tmp_path)
    assert {"clips.jpg", "generated.jpg"} < {path.name for path in tmp_path.iterdir()}
    with Image.open(tmp_path / "generated.webp") as moving:
        # Four clips, as they are and in four ways.
        assert moving.n_frames == 32 and moving.size == (4 * 64, 5 * 64)


def test_a_predicted_clip_begins_as_the_true_one(inputs: Inputs) -> None:
    model, batch = model_of(inputs), batch_of(inputs, "validation", 2)
    drawn = _generated(model, batch["x"], batch["labels"])
    whole = drawn["reconstructed"]
    assert torch.equal(drawn["second half predicted"][:, :16], whole[:, :16])
    assert torch.equal(drawn["all but the ends interpolated"][:, :2], whole[:, :2])
    for name in set(drawn) - {"reconstructed"}:
        assert not torch.equal(drawn[name][:, 20:], whole[:, 20:])


def test_the_loss_of_a_code_is_that_of_its_digits() -> None:
    levels = (8, 5)
    quantizer = Quantizer(levels)
    codes = torch.arange(40).view(1, 5, 8)
    sure = torch.full((1, 5, 8, 13), -50.0)
    digits = torch.stack([codes % 8, codes // 8], dim=-1)
    assert torch.equal(quantizer.indices(quantizer.values(codes)), codes)
    sure.scatter_(3, digits + torch.tensor([0, 8]), 50.0)
    assert _digits_loss(levels, sure, codes).abs().max() < 1e-6
    unsure = _digits_loss(levels, torch.zeros(1, 5, 8, 13), codes)
    assert torch.allclose(unsure, torch.full_like(unsure, math.log(40)))


def test_the_crop_is_a_square_around_the_ball() -> None:
    tracks = torch.tensor([[[10.0, 20.0, 2.0]]])
    mask = crop_mask(tracks, 64, 64)[0, 0, :, :, 0]
    rows, columns = mask.nonzero().T
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (17, 22, 7, 12)
    assert mask.sum() == 36


def test_psnr_and_code_usage_are_what_their_definitions_say(tmp_path: Path) -> None:
    counts = torch.zeros(1000, dtype=torch.long)
    counts[:10] = 5
    sums = {"squared": (0.01 * 400, 400.0), "squared_crop": (0.04 * 50, 50.0)}
    sums["squared_mean_crop"] = (0.1 * 50, 50.0)
    empty = torch.zeros(0, 6, 64, 64, 3, dtype=torch.uint8)
    part = Partial(sums=sums, tensors={"codes": counts, "truth": empty, "reconstructed": empty})
    metrics = TrainTokenizer(config=SMALL).summarize([part, part], tmp_path)
    assert metrics["psnr"] == pytest.approx(20.0)
    assert metrics["psnr_ball"] == pytest.approx(10.0 * math.log10(25.0))
    assert metrics["mean_image_psnr_ball"] == pytest.approx(10.0)
    assert metrics["code_usage"] == pytest.approx(0.01)
    assert metrics["code_perplexity"] == pytest.approx(10.0)


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
    assert part.tensors["codes"].sum() == 3 * 16 * 256
    assert torch.equal(part.tensors["truth"], part.tensors["reconstructed"])
    stage.show(model, inputs, [part], tmp_path)
    assert (tmp_path / "reconstructions.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stem", "none"),
        ("levels", "8,x"),
        ("levels", "8,1"),
        ("levels", "8,8,8,8,9"),
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
