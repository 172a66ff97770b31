"""The first stages of the MAGVIT recipes: Train `tokenizer`, Prepare `tokens`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training import (
    Captioned,
    Inputs,
    Loss,
    Partial,
    Prior,
    Probe,
    Settings,
    Start,
    Train,
    write_sheet,
)
from training.workloads.trajectory.clip_dataset import (
    NUM_STRIPS,
    STRIP_FRAMES,
    Batch,
    FrameSamples,
    open_dataset,
)
from training.workloads.trajectory.clips import CLIP_SHAPE, NUM_FRAMES, TRACK_SHAPE, Frames
from training.workloads.trajectory.config import MagvitConfig
from training.workloads.trajectory.features import PreparedClips
from training.workloads.trajectory.magvit.tokenizer import JudgedTokenizer, Tokenizer, to_uint8
from training.workloads.trajectory.model import parameter_groups

_NUM_CALIBRATING = 32  # clips
# A pixel moves if it differs from the clip's mean image by this share of the range, which is more
# than flicker and noise.
_MOVING = 0.15
# Half the side of the crop around the ball, in radii of the ball.
_CROP_RADII = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTokenizer(Train):
    """Training of a tokenizer to reconstruct clips from their codes."""

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
        """Return a batch with the shapes of `collate`'s."""
        return {
            "frames": torch.zeros((size, *CLIP_SHAPE), dtype=torch.uint8),
            "tracks": torch.zeros((size, *TRACK_SHAPE)),
            "clips": torch.zeros(size, dtype=torch.long),
            "shown": torch.zeros(size, dtype=torch.bool),
        }

    def model(self, i: Inputs) -> nn.Module:
        c = self.config
        if c.perceptual_weight or c.adversarial_weight:
            return JudgedTokenizer(seed=c.seed, **_shape(c))
        return build_tokenizer(c)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        if isinstance(m, JudgedTokenizer):
            samples = self.samples(i, "train")
            num = min(_NUM_CALIBRATING, len(samples))
            items = [samples.get(k, -1, torch.Generator()) for k in range(num)]
            m.start_judging(self.config.weights, samples.collate(items)["frames"])
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
        """Return the squared error, with more weight for moving pixels, and the judges' losses."""
        start = 4 * (step % ((NUM_FRAMES - self.config.tokenizer_frames) // 4 + 1))
        frames_BTHW3 = b["frames"][:, start : start + self.config.tokenizer_frames]
        pixels_BTHW3, _, *judged = m(frames_BTHW3)
        truth_BTHW3 = frames_BTHW3.float() / 255.0
        moving_BTHW1 = _moving(truth_BTHW3)
        weight_BTHW1 = 1.0 + self.config.motion_weight * moving_BTHW1
        squared = (pixels_BTHW3.float() - truth_BTHW3).square() * weight_BTHW1
        total = squared.mean(dim=(1, 2, 3, 4)).sum()
        if not judged:
            return Loss(total=total)
        apart, displeased, mistaken = (each.float().sum() for each in judged)
        c, count = self.config, len(b["frames"])
        return Loss(
            total=total
            + c.perceptual_weight * apart
            + c.adversarial_weight * displeased
            + mistaken,
            metrics={"perceptual": (apart.detach(), count), "critic": (mistaken.detach(), count)},
        )

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Return squared errors, code counts and a few clips to show."""
        assert isinstance(m, Tokenizer)
        frames, shown, strip = b["frames"], b["shown"], list(STRIP_FRAMES)
        pixels_BTHW3, quantized = m(frames)
        pixels_BTHW3 = pixels_BTHW3.float().clamp(0.0, 1.0)
        truth_BTHW3 = frames.float() / 255.0
        squared = (pixels_BTHW3 - truth_BTHW3).square()
        of_mean = (truth_BTHW3.mean(dim=1, keepdim=True) - truth_BTHW3).square()
        crop = _crop_mask(b["tracks"][:, :-1], *frames.shape[2:4])
        codes = m.quantizer.indices(quantized).flatten()
        return Partial(
            sums={
                "squared": (float(squared.sum()), squared.numel()),
                "squared_crop": (float((squared * crop).sum()), 3.0 * float(crop.sum())),
                "squared_mean_crop": (float((of_mean * crop).sum()), 3.0 * float(crop.sum())),
            },
            tensors={
                "codes": codes.cpu(),
                "truth": frames[shown][:, strip].cpu(),
                "reconstructed": to_uint8(pixels_BTHW3[shown][:, strip]).cpu(),
            },
        )

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Return PSNR in dB of all pixels and of the crops, and the codes' perplexity."""
        codes = torch.cat([part.tensors["codes"] for part in parts]).numpy()
        shares = np.unique(codes, return_counts=True)[1] / len(codes)
        has_ball = any(part.sums["squared_crop"][1] for part in parts)
        # For the crops, also the PSNR of the clip's mean image.
        of_ball = {"psnr_ball": "squared_crop", "mean_image_psnr_ball": "squared_mean_crop"}
        return {
            "psnr": psnr(parts, "squared"),
            **({name: psnr(parts, sums) for name, sums in of_ball.items()} if has_ball else {}),
            "code_perplexity": float(np.exp(-(shares * np.log(shares)).sum())),
        }

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Draw clips, each above its reconstruction."""
        pictures = []
        for part in parts:
            for pair in zip(part.tensors["truth"], part.tensors["reconstructed"], strict=True):
                rows = [np.concatenate(list(clip_THW3.numpy()), axis=1) for clip_THW3 in pair]
                pictures.append(Captioned(np.concatenate(rows)))
        if pictures:
            heading = "clips, each above its reconstruction"
            write_sheet(out / "reconstructions.png", heading, pictures, num_columns=2)


def psnr(parts: Sequence[Partial], name: str) -> float:
    """Compute PSNR in dB for pixels of 0 .. 1 whose squared errors are the sums `name`."""
    total = sum(part.sums[name][0] for part in parts)
    count = sum(part.sums[name][1] for part in parts)
    return float(-10.0 * torch.log10(torch.tensor(max(total / max(count, 1.0), 1e-12))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens(PreparedClips):
    """The codes of every clip, from the tokenizer of the previous stage."""

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
        """Probe the complete tokenizer with one clip, although `make` needs only its encoder."""
        return Probe(
            build=lambda: build_tokenizer(self.config),
            batch=torch.zeros((1, *CLIP_SHAPE), dtype=torch.uint8),
            size=1,
        )

    @torch.inference_mode()
    def of_clips(self, i: Inputs, frames: Frames) -> Mapping[str, Tensor]:
        """Return {"tokens": (clips, t + 1, cells) int32}.

        The last row has the last step's tokens if only its and the first step's frames are known.
        """
        assert i.prior is not None
        tokenizer = build_tokenizer(self.config, i.prior)
        tokenizer.to(i.device).eval()
        of_step = NUM_FRAMES // self.config.token_shape[0]
        # Clip by clip, so a clip's codes cannot depend on its neighbours in a shard.
        tokens = []
        for clip in frames:
            clip_1THW3 = torch.from_numpy(clip[None].copy()).to(i.device)
            codes_1tG, hints_1tG = (
                tokenizer.quantizer.indices(tokenizer.encode(each)).flatten(2)
                for each in (clip_1THW3, _blended(clip_1THW3, of_step))
            )
            tokens.append(torch.cat([codes_1tG, hints_1tG[:, -1:]], dim=1).to("cpu", torch.int32))
        return {"tokens": torch.cat(tokens)}


def _blended(clips_BTHW3: Tensor, num_given: int) -> Tensor:
    """Keep the first and last `num_given` frames of clips, and fade between them."""
    first_B1HW3 = clips_BTHW3[:, num_given - 1 : num_given].float()
    last_B1HW3 = clips_BTHW3[:, -num_given:][:, :1].float()
    num_between = clips_BTHW3.shape[1] - 2 * num_given
    share_T111 = torch.arange(1, num_between + 1, device=clips_BTHW3.device).view(-1, 1, 1, 1)
    between = torch.lerp(first_B1HW3, last_B1HW3, share_T111 / (num_between + 1)).round().byte()
    return torch.cat([clips_BTHW3[:, :num_given], between, clips_BTHW3[:, -num_given:]], dim=1)


def _moving(clips_BTHW3: Tensor) -> Tensor:
    """Return 1 where a pixel (of 0 .. 1) differs from its clip's mean image, (B, T, H, W, 1)."""
    away = (clips_BTHW3 - clips_BTHW3.mean(dim=1, keepdim=True)).abs()
    return (away.amax(dim=4, keepdim=True) > _MOVING).float()


def _crop_mask(tracks_BT3: Tensor, height: int, width: int) -> Tensor:
    """Return 1 in a square around the ball in each frame, (B, T, H, W, 1)."""
    x, y, radius = (tracks_BT3[..., k, None, None] for k in range(3))
    half = _CROP_RADII * radius
    rows = torch.arange(height, device=tracks_BT3.device)[:, None] + 0.5
    columns = torch.arange(width, device=tracks_BT3.device)[None, :] + 0.5
    inside = ((rows - y).abs() <= half) & ((columns - x).abs() <= half)
    return inside[..., None].float()


def build_tokenizer(c: MagvitConfig, prior: Prior | None = None) -> Tokenizer:
    """Return a newly initialized tokenizer, or the one that was trained, without its judges."""
    tokenizer = Tokenizer(**_shape(c))
    if prior is not None:
        tokenizer.load_state_dict({name: prior.model[name] for name in tokenizer.state_dict()})
    return tokenizer


def _shape(c: MagvitConfig) -> dict[str, Any]:
    return {"stem": c.stem, "width": c.tokenizer_width, "levels": c.num_levels}
