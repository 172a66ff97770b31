"""MAGVIT's Transformer: what it guesses, decodes and draws, and what an evaluation tells of it."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.training.workloads.trajectory.magvit.scene import transformer_stage
from training.settings import changed
from training.workload import Inputs
from training.workloads.trajectory.clip_dataset import open_dataset
from training.workloads.trajectory.clips import CLASSES
from training.workloads.trajectory.magvit.model import (
    Quantizer,
    TokenTransformer,
    _carried,
    _digits_loss,
    _draw,
    _generated,
    _hidden,
)
from training.workloads.trajectory.magvit.stages import _blended
from training.workloads.trajectory.trajectory_workload import TRAJECTORY


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


def in_two_steps(model: TokenTransformer) -> TokenTransformer:
    """Decoding in the fewest steps of which each kind, a first and a last one, is there."""
    model.decode = partial(model.decode, num_steps=2)  # type: ignore[assignment]
    return model


def test_the_transformer_guesses_what_is_hidden_only(inputs: Inputs) -> None:
    model, tokens = model_of(inputs), batch_of(inputs, "train", 3)["x"]
    hidden = torch.zeros((2, 16, 256), dtype=torch.bool)
    hidden[1, 3:5] = hidden[1, -1] = True
    hinted, classes = torch.tensor([False, True]), torch.tensor([11, 4])
    logits, futures, places, guesses = model(tokens, hidden, hinted, classes)
    assert logits.shape == (3, len(CLASSES)) and futures.shape == (3, 32, 2)
    assert places.shape == (3, 32, 2) and guesses.shape == (2, 16, 256, 6 * 16)
    # What is hidden is not seen: another code there changes nothing; the hint and the class do.
    changed = tokens.clone()
    changed[1, 3:5] = (changed[1, 3:5] + 5000) % 16**6
    assert torch.equal(model(changed, hidden, hinted, classes)[3], guesses)
    changed[1, -1] = (changed[1, -1] + 5000) % 16**6
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
    values = model.quantizer.values(codes.long()).view(1, 16, 16, 16, 6)
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
    assert codes.min() >= 0 and codes.max() < 16**6
    assert (codes[hidden] != tokens[:, :-1].long()[hidden]).float().mean() > 0.9
    # The path, and twelve steps, each with less to fill in.
    assert len(seen) == 13 and seen[0] == seen[1] == int(hidden.sum())
    assert seen[7] == int(2048 * 0.875) + int(7 * 0.875)
    assert sorted(seen, reverse=True) == seen and seen[-1] < 0.25 * seen[0]


def test_a_code_is_drawn_as_often_as_it_is_likely() -> None:
    torch.manual_seed(0)
    quantizer = Quantizer((3, 2))
    shares = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.8])
    guesses = torch.cat([share.log() for share in shares]).expand(1, 1, 20_000, 5)
    codes, sure = _draw(quantizer, guesses, 1.0)
    expected = (shares[1][:, None] * shares[0]).flatten()
    assert (codes.flatten().bincount(minlength=6) / 20_000 - expected).abs().max() < 0.01
    assert torch.allclose(sure, expected.log()[codes], atol=1e-5)


def test_at_a_temperature_of_0_the_likeliest_code_is_taken() -> None:
    guesses = torch.tensor([0.6, 0.3, 0.1, 0.2, 0.8]).log().expand(1, 1, 50, 5)
    codes, sure = _draw(Quantizer((3, 2)), guesses, 0.0)
    assert (codes == 3).all() and torch.allclose(sure.exp(), torch.tensor(0.48))


def test_what_is_known_of_a_cell_is_the_last_code_that_was_seen() -> None:
    codes = torch.arange(1, 6).view(1, 5, 1)
    seen = torch.tensor([False, True, False, False, True]).view(1, 5, 1)
    carried, is_known = _carried(codes, seen)
    assert is_known.flatten().tolist() == [False, True, True, True, True]
    assert carried[is_known].tolist() == [2, 2, 2, 5]


@pytest.mark.parametrize(("which", "expected"), [(0, 9), (1, 6), (2, 3)])
def test_a_hidden_code_is_guessed_near_its_cells_last_one_or_a_mean(
    inputs: Inputs, which: int, expected: int
) -> None:
    model = model_of(inputs)
    values = model.quantizer.basis.sum() * torch.tensor([5, 4, 6, *(12 * [9]), 0, 0])
    tokens = values[:, None].repeat(1, 1, 256).int()
    tokens[:, :, 128:] = 0
    hidden = torch.zeros((1, 16, 256), dtype=torch.bool)
    hidden[:, 3:14] = hidden[:, 15:] = True
    with torch.no_grad():
        torch.nn.init.zeros_(model.painter.guess.weight)
        near = model.painter.nearness.bias.view(4, 4, 6)
        torch.nn.init.zeros_(model.painter.nearness.weight)
        near.fill_(-20.0)
        near[:, which] = 20.0
        guesses = model(tokens, hidden, torch.zeros(1).bool(), torch.tensor([11]))[-1]
    # Seen are 5, 4, 6 and, in the 15th step, 9: 6 on average, and 3 with the other cells.
    assert (guesses[0, 15, :128].view(128, 6, 16).argmax(dim=-1) == expected).all()


def test_places_behind_the_mask_are_learned_too(inputs: Inputs) -> None:
    stage, model = transformer_stage(inputs.config), model_of(inputs)
    batch = batch_of(inputs, "train", 4)
    means = []
    for moved in (0.0, 1.0):
        torch.manual_seed(0)
        places = batch["places"].clone()
        places[:1] += moved
        loss = stage.loss(model, {**batch, "places": places}, 0, 1)
        assert loss.mean is not None
        means.append((loss.mean.item(), loss.total.item()))
    assert means[1][0] > means[0][0] + 0.1 and means[1][1] == means[0][1]


def test_what_is_hidden_follows_the_task() -> None:
    torch.manual_seed(0)
    hidden, hinted = _hidden(torch.zeros((3000, 8, 64), dtype=torch.long))
    assert 0.22 < hinted.float().mean() < 0.28
    # Of a clip that is interpolated the first step is given, of others some steps or none.
    assert not hidden[hinted][:, 0].any() and hidden[hinted][:, 1].any()
    first = (hidden[~hinted].float().mean(dim=2) > 0).float().argmax(dim=1)
    assert 0.3 < (first == 0).float().mean() < 0.4 and first.max() == 7


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
    ((masked, _, classes, path, true),) = seen
    num_masked = int(6 * stage.config.masked_share)
    assert len(masked) == len(classes) == num_masked and masked.any()
    assert torch.isin(classes, torch.cat([batch["labels"], torch.tensor([11])])).all()
    # Codes are painted around the true path, the flow learns that of whole clips.
    is_told = ~path.isnan()
    assert torch.equal(path[is_told], batch["places"][:num_masked][is_told]) and is_told.any()
    assert torch.equal(true[0], batch["places"]) and torch.equal(true[1], batch["labels"])
    guess, count = loss.metrics["masked_loss"]
    # Were each of 2^24 codes as likely, it were 16.6; what is near is taken for likelier.
    assert count == 1.0 and 4.0 < float(guess) < 16.6
    assert loss.mean is not None and loss.mean.item() > stage.config.masked_weight * float(guess)


def test_fails_on_micro_batches_of_which_no_clip_would_be_masked(inputs: Inputs) -> None:
    with pytest.raises(ValueError, match=r"micro_batch is 2, of which a masked_share of 0\.25 is"):
        changed(inputs.config, micro_batch=2)
    assert changed(inputs.config, micro_batch=2, masked_share=0.0).least_micro_batch == 1
    names = [rung.name for rung in TRAJECTORY.rungs(inputs.config)]
    assert names == ["micro-batch 8", "micro-batch 4", "autocast bfloat16"]
    least = transformer_stage(changed(inputs.config, micro_batch=4))
    loss = least.loss(model_of(inputs), batch_of(inputs, "train", 4), 0, 1)
    assert float(loss.metrics["masked_loss"][0]) > 4.0


def test_hidden_codes_are_painted_where_the_ball_goes(inputs: Inputs) -> None:
    model, batch = model_of(inputs), batch_of(inputs, "train", 1)
    hidden = torch.zeros((1, 16, 256), dtype=torch.bool)
    hidden[:, 8:] = True
    told = hidden, torch.zeros(1).bool(), torch.tensor([11])
    here = batch["places"]
    there = here.clone()
    there[:, 20:22] += 0.5
    guesses, moved, untold = (
        model(batch["x"], *told, path)[3] for path in (here, there, there * torch.nan)
    )
    assert torch.equal(untold, model(batch["x"], *told)[3])
    assert not torch.allclose(untold, guesses)
    # Frames 20 and 21 are those of the 11th step.
    away = (guesses - moved).abs().amax(dim=(2, 3))[0]
    assert away.argmax() == 10


def test_a_hidden_code_is_guessed_near_what_the_ball_looks_like(inputs: Inputs) -> None:
    model = model_of(inputs)
    digits = torch.full((1, 17, 16, 16), 3)
    # The ball stays in the third row and fourth column of tokens: 4 pixels each.
    digits[:, :8, 2, 3] = 12
    tokens = (digits.flatten(2) * model.quantizer.basis.sum()).int()
    hidden = torch.zeros((1, 16, 256), dtype=torch.bool)
    hidden[:, 8:] = True
    path = torch.tensor([14.0, 10.0]).expand(1, 32, 2) / 32.0 - 1.0
    with torch.no_grad():
        torch.nn.init.zeros_(model.painter.guess.weight)
        torch.nn.init.zeros_(model.painter.nearness.weight)
        near = model.painter.nearness.bias.view(4, 4, 6)
        near.fill_(-20.0)
        near[:, 3] = 20.0
        told = hidden, torch.zeros(1).bool(), torch.tensor([11])
        guesses = model(tokens, *told, path)[3].view(1, 16, 256, 6, 16)
    # Its neighbours are part of what is seen around it.
    assert (guesses[:, 8:].argmax(dim=-1) >= 10).all() and (guesses.argmax(dim=-1) <= 12).all()


@pytest.mark.parametrize("given", [8, 12])
def test_decoding_draws_the_path_from_the_steps_that_are_seen(inputs: Inputs, given: int) -> None:
    model, tokens = model_of(inputs), batch_of(inputs, "train", 2)["x"]
    hidden = torch.zeros((2, 16, 256), dtype=torch.bool)
    hidden[:, given:] = True
    seen: list[Any] = []
    assert model.flow is not None
    draw = model.flow.draw

    def watched(found: torch.Tensor, is_seen: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((is_seen, *rest))
        return draw(found, is_seen, *rest)

    model.flow.draw = watched  # type: ignore[method-assign]
    model.decode(tokens, hidden, torch.tensor([False, True]), torch.tensor([11, 2]), 0.5, 2)
    ((is_seen, classes, temperature),) = seen
    assert is_seen[0].tolist() == [True] * 2 * given + [False] * 2 * (16 - given)
    assert is_seen[1, -2:].all() and torch.equal(is_seen[1, :-2], is_seen[0, :-2])
    assert classes.tolist() == [11, 2] and temperature == 0.5


def test_without_tracks_no_path_is_told(inputs: Inputs) -> None:
    config = changed(inputs.config, position_weight=0.0)
    without = replace(inputs, config=config)
    model, batch = model_of(without), batch_of(inputs, "train", 4)
    assert model.flow is None
    batch |= {name: batch[name] * torch.nan for name in ("places", "futures")}
    loss = transformer_stage(config).loss(model, batch, 0, 1)
    assert loss.total.isfinite() and loss.mean is not None and loss.mean.isfinite()
    hidden = torch.ones((4, 16, 256), dtype=torch.bool)
    codes = model.decode(batch["x"], hidden, torch.zeros(4).bool(), batch["labels"], 1.0, 2)
    assert codes.shape == (4, 16, 256)


def test_an_evaluation_compares_what_is_predicted_with_the_last_frame(
    inputs: Inputs, tmp_path: Path
) -> None:
    stage = transformer_stage(inputs.config)
    model, batch = in_two_steps(model_of(inputs)), batch_of(inputs, "validation", 11)
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
    model, batch = in_two_steps(model_of(inputs)), batch_of(inputs, "validation", 2)
    drawn = _generated(model, batch["x"], batch["labels"], 1.0)
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
