"""Stages of the MAGVIT recipes: Train `tokenizer` -> Prepare `tokens` -> Train `transformer`."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training.evaluation_files import Captioned, write_sheet
from training.workload import Inputs, Loss, Partial, Probe, Settings, Start, Train
from training.workloads.trajectory.clips import CLIP_SHAPE, TRACK_SHAPE
from training.workloads.trajectory.config import MagvitConfig
from training.workloads.trajectory.dataset import (
    NUM_STRIPS,
    STRIP_FRAMES,
    Batch,
    FrameSamples,
    open_dataset,
    shard_frames,
)
from training.workloads.trajectory.features import PreparedClips
from training.workloads.trajectory.magvit.model import (
    Quantizer,
    Tokenizer,
    TokenTransformer,
    crop_mask,
    moving,
)
from training.workloads.trajectory.model import TrainClipClassifier, parameter_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTokenizer(Train):
    """Trains a tokenizer to reconstruct clips from their codes."""

    config: MagvitConfig
    name: str = "tokenizer"

    @property
    def settings(self) -> Settings:
        c = self.config
        return replace(
            c.settings,
            epochs=c.tokenizer_epochs,
            global_batch=c.tokenizer_batch,
            micro_batch=c.tokenizer_batch,
            eval_batch=c.tokenizer_batch,
            evaluate_every_epochs=1,
        )

    def example(self, size: int) -> Batch:
        """A batch in the shapes that `collate` gives."""
        return {
            "frames": torch.zeros((size, *CLIP_SHAPE), dtype=torch.uint8),
            "tracks": torch.zeros((size, *TRACK_SHAPE)),
            "clips": torch.zeros(size, dtype=torch.long),
            "shown": torch.zeros(size, dtype=torch.bool),
        }

    def model(self, i: Inputs) -> nn.Module:
        return _build_tokenizer(self.config)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        return Start(facts={"codes": self.config.num_codes})

    def optimizer(self, m: nn.Module) -> Optimizer:
        c = self.config
        groups = parameter_groups(m, c.weight_decay)
        return AdamW(groups, lr=c.tokenizer_learning_rate, fused=c.fused_optimizer or None)

    def samples(self, i: Inputs, split: str) -> FrameSamples:
        data = open_dataset(i.dataset.folder)
        indices = data.splits[split]
        return FrameSamples(data=data, indices=indices, shown=frozenset(indices[:NUM_STRIPS]))

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Squared error, with the additional weight `motion_weight` for moving pixels."""
        pixels_BTHW3, _ = m(b["frames"])
        truth_BTHW3 = b["frames"].float() / 255.0
        moving_BTHW1 = moving(truth_BTHW3)
        weight_BTHW1 = 1.0 + self.config.motion_weight * moving_BTHW1
        squared = (pixels_BTHW3.float() - truth_BTHW3).square() * weight_BTHW1
        return Loss(total=squared.mean(dim=(1, 2, 3, 4)).sum())

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Squared errors, code counts, a few clips to show."""
        assert isinstance(m, Tokenizer)
        frames, shown, strip = b["frames"], b["shown"], list(STRIP_FRAMES)
        pixels_BTHW3, quantized = m(frames)
        pixels_BTHW3 = pixels_BTHW3.float().clamp(0.0, 1.0)
        squared = (pixels_BTHW3 - frames.float() / 255.0).square()
        crop = crop_mask(b["tracks"][:, :-1], *frames.shape[2:4])
        codes = m.quantizer.indices(quantized).flatten()
        reconstructed = (pixels_BTHW3[shown][:, strip] * 255.0).round()
        return Partial(
            sums={
                "squared": (float(squared.sum()), squared.numel()),
                "squared_crop": (float((squared * crop).sum()), 3.0 * float(crop.sum())),
            },
            tensors={
                "codes": torch.bincount(codes, minlength=m.quantizer.num_codes).cpu(),
                "truth": frames[shown][:, strip].cpu(),
                "reconstructed": reconstructed.to("cpu", torch.uint8),
            },
        )

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """PSNR in dB of all pixels and of the crops; share of codes in use, their perplexity."""
        counts = torch.stack([part.tensors["codes"] for part in parts]).sum(dim=0).double()
        shares = counts[counts > 0] / counts.sum()
        has_ball = any(part.sums["squared_crop"][1] for part in parts)
        return {
            "psnr": _psnr(parts, "squared"),
            **({"psnr_ball": _psnr(parts, "squared_crop")} if has_ball else {}),
            "code_usage": float((counts > 0).double().mean()),
            "code_perplexity": float((-shares * shares.log()).sum().exp()),
        }

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Clips, each above its reconstruction."""
        pictures = []
        for part in parts:
            for pair in zip(part.tensors["truth"], part.tensors["reconstructed"], strict=True):
                rows = [np.concatenate(list(clip_THW3.numpy()), axis=1) for clip_THW3 in pair]
                pictures.append(Captioned(np.concatenate(rows)))
        if pictures:
            heading = "clips, each above its reconstruction"
            write_sheet(out / "reconstructions.png", heading, pictures, num_columns=2)


def _psnr(parts: Sequence[Partial], name: str) -> float:
    total = sum(part.sums[name][0] for part in parts)
    count = sum(part.sums[name][1] for part in parts)
    return float(-10.0 * torch.log10(torch.tensor(max(total / max(count, 1.0), 1e-12))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens(PreparedClips):
    """The codes of every clip, by the tokenizer committed before."""

    config: MagvitConfig
    name: str = "tokens"

    def facts(self, i: Inputs) -> Mapping[str, Any]:
        assert i.prior is not None
        digest = hashlib.sha256()
        for name in sorted(i.prior.model):
            digest.update(name.encode())
            digest.update(i.prior.model[name].contiguous().numpy().tobytes())
        return {
            "tokenizer": digest.hexdigest(),
            "stem": self.config.stem,
            "levels": self.config.levels,
        }

    def probe(self) -> Probe:
        """One clip through the whole tokenizer, although `make` needs only its encoder."""
        return Probe(
            build=lambda: _build_tokenizer(self.config),
            batch=torch.zeros((1, *CLIP_SHAPE), dtype=torch.uint8),
            size=1,
        )

    @torch.inference_mode()
    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        """Return {"tokens": (clips, t, cells) int16} for the clips of one shard."""
        assert i.prior is not None
        tokenizer = _build_tokenizer(self.config)
        tokenizer.load_state_dict(dict(i.prior.model))
        tokenizer.to(i.device).eval()
        frames = shard_frames(i.dataset.folder, shard, self.num_shards)
        # Clip by clip: a clip's codes cannot depend on its neighbours in a shard.
        codes = []
        for clip in frames:
            clip_1THW3 = torch.from_numpy(clip[None].copy()).to(i.device)
            codes_1thw = tokenizer.quantizer.indices(tokenizer.encode(clip_1THW3))
            codes.append(codes_1thw.flatten(2).to("cpu", torch.int16))
        return {"tokens": torch.cat(codes)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTransformer(TrainClipClassifier):
    """Trains on masked tokens, and on the class and future position of unmasked clips."""

    config: MagvitConfig

    def model_input(self, size: int) -> Tensor:
        return torch.zeros((size, *self.config.token_shape), dtype=torch.int16)

    def model(self, i: Inputs) -> nn.Module:
        c = self.config
        num_steps, num_cells = c.token_shape
        return TokenTransformer(
            quantizer=Quantizer(c.num_levels),
            num_steps=num_steps,
            num_cells=num_cells,
            merged=c.merged,
            num_classes=len(self.classes),
            width=c.width,
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            dropout=c.dropout,
        )

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Class and position of unmasked clips, masked tokens of the others.

        In a masked clip the share cos(u pi / 2) of the tokens is hidden, with u uniform (MaskGIT,
        Chang et al. 2022, arXiv:2202.04200).
        """
        codes_BtG = b["x"].long()
        num_clips, device = len(codes_BtG), codes_BtG.device
        num_masked = int(self.config.masked_share * num_clips)
        share_M = torch.cos(torch.rand(num_masked, device=device) * (math.pi / 2))
        masked_MtG = (
            torch.rand(codes_BtG[:num_masked].shape, device=device) < share_M[:, None, None]
        )
        logits_BK, future_B2, guesses_MtGV = m(codes_BtG, masked_MtG)
        whole = {name: b[name][num_masked:] for name in ("labels", "future")}
        loss = self.loss_of(whole, logits_BK[num_masked:].float(), future_B2[num_masked:].float())
        levels = self.config.num_levels
        guess_MtG = _digits_loss(levels, guesses_MtGV.float(), codes_BtG[:num_masked])
        # Visible tokens have weight 0, so that no shape depends on the data.
        num_hidden = masked_MtG.sum()
        guess = (guess_MtG * masked_MtG).sum() / num_hidden.clamp(min=1)
        return Loss(
            total=loss.total * (num_clips / (num_clips - num_masked)),
            mean=self.config.masked_weight * guess,
            metrics={**loss.metrics, "masked_loss": (guess.detach(), 1.0)},
        )


def _digits_loss(levels: Sequence[int], guesses_MtGV: Tensor, codes_MtG: Tensor) -> Tensor:
    """Cross entropy of guessed codes, (M, t, G): the sum over a code's dimensions."""
    losses = []
    rest = codes_MtG.flatten()
    for level, logits_MtGL in zip(levels, torch.split(guesses_MtGV, list(levels), -1), strict=True):
        logits = logits_MtGL.flatten(0, 2)
        losses.append(F.cross_entropy(logits, rest % level, reduction="none"))
        rest = rest // level
    return torch.stack(losses).sum(dim=0).view(codes_MtG.shape)


def _build_tokenizer(c: MagvitConfig) -> Tokenizer:
    """Return a newly initialised tokenizer."""
    return Tokenizer(stem=c.stem, width=c.tokenizer_width, levels=c.num_levels)
