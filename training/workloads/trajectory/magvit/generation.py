"""Stage `transformer` of the MAGVIT recipes: learns to fill in tokens, and the class of a clip.

It draws what it generates: the second half of a clip from its first, the frames between its ends,
and clips of a class. B clips, M masked ones, t token steps in time (s: plus the row of hints after
them), G cells of the token grid, T frames, K classes, V the sum of a code's levels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import Captioned, Inputs, Loss, Partial, Start, write_moving, write_sheet
from training.workloads.trajectory.clip_dataset import STRIP_FRAMES, Batch
from training.workloads.trajectory.clips import FRAME_SIZE, NUM_FRAMES
from training.workloads.trajectory.config import MagvitConfig
from training.workloads.trajectory.magvit.model import TokenTransformer, near_ball
from training.workloads.trajectory.magvit.stages import build_tokenizer, psnr
from training.workloads.trajectory.model import TrainClipClassifier

# The extra weight of a token that the ball covers in the masked loss, as most are background.
_BALL_WEIGHT = 10.0
# The number of clips for which generated ones are drawn, and their heading.
_NUM_DRAWN = 4
_GENERATED = "clips, and what decoding in 12 steps makes of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTransformer(TrainClipClassifier):
    """Training on masked tokens, and on class and places of unmasked clips."""

    config: MagvitConfig

    def model_input(self, size: int) -> Tensor:
        num_steps, num_cells = self.config.token_shape
        return torch.zeros((size, num_steps + 1, num_cells), dtype=torch.int32)

    def example(self, size: int) -> Batch:
        places = torch.zeros(size, NUM_FRAMES, 2)
        batch = TrainClipClassifier.example(self, size)
        return {**batch, "places": places, "futures": places}

    def model(self, i: Inputs) -> nn.Module:
        return TokenTransformer(build_tokenizer(self.config), self.config)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the splits and take the tokenizer trained in the previous stage."""
        assert isinstance(m, TokenTransformer) and i.prior is not None
        m.tokenizer.load_state_dict(build_tokenizer(self.config, i.prior).state_dict())
        # dataclass(slots=True) creates a new class, which super() does not know.
        return TrainClipClassifier.start(self, m, i)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Return the loss of unmasked clips' class and places, and of the others' masked tokens."""
        tokens_BsG, num_masked = b["x"].long(), int(self.config.masked_share * len(b["x"]))
        codes_MtG = tokens_BsG[:num_masked, :-1]
        hidden_MtG, is_hinted_M = _hidden(codes_MtG)
        # A tenth of the classes is not given, as in classifier-free guidance.
        is_told_M = torch.rand(num_masked, device=codes_MtG.device) > 0.1
        classes_M = torch.where(is_told_M, b["labels"][:num_masked], len(self.classes))
        # Nor is a tenth of the paths, which are then NaN, as for clips without a track.
        is_told_M = torch.rand(num_masked, device=codes_MtG.device) > 0.1
        path_MT2 = b["places"][:num_masked].where(is_told_M[:, None, None], torch.nan)
        *found, guesses_MtGV, path_loss = m(
            *(tokens_BsG, hidden_MtG, is_hinted_M, classes_M, path_MT2),
            (b["places"], b["labels"]),
        )
        whole = {name: b[name][num_masked:] for name in ("labels", "futures", "places")}
        loss = self.loss_of(whole, *(each[num_masked:].float() for each in found))
        total = loss.total + self.config.position_weight * path_loss
        guess_MtG = _digits_loss(self.config.num_levels, guesses_MtGV.float(), codes_MtG)
        # Visible tokens have weight 0, so no shape depends on the data.
        ball_MtG = near_ball(b["places"][:num_masked], codes_MtG.shape[1:])
        weight_MtG = hidden_MtG * (1.0 + _BALL_WEIGHT * ball_MtG)
        guess = (guess_MtG * weight_MtG).sum() / weight_MtG.sum().clamp(min=1)
        # The ball's place behind the mask shows where its tokens are.
        place = self.place_loss(b["places"][:num_masked], found[2][:num_masked].float())
        return Loss(
            total=total * (len(tokens_BsG) / len(whole["labels"])),
            mean=self.config.masked_weight * (guess + place / max(num_masked, 1)),
            metrics={**loss.metrics, "masked_loss": (guess.detach(), 1.0)},
        )

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Evaluate like other classifiers, and also predict the end of the clips shown."""
        # dataclass(slots=True) creates a new class, which super() does not know.
        part = TrainClipClassifier.evaluate(self, m, b)
        if "strips" not in b:
            return part
        assert isinstance(m, TokenTransformer)
        is_shown = torch.isin(b["clips"], b["strip_clips"])
        tokens_BsG, truth_BTHW3 = b["x"][is_shown], b["strips"]
        hidden_BtG = torch.zeros_like(tokens_BsG[:, :-1], dtype=torch.bool)
        num_steps = hidden_BtG.shape[1]
        hidden_BtG[:, -(num_steps // 4) :] = True
        codes_BtG = _decoded(m, tokens_BsG, hidden_BtG, temperature=0.0)
        found = m(torch.cat([codes_BtG, tokens_BsG[:, -1:].long()], dim=1))
        first = NUM_FRAMES - NUM_FRAMES // 4
        pictures = {
            "predicted": m.draw(codes_BtG)[:, first:],
            "copied": truth_BTHW3[:, first - 1 : first],
        }
        true_BT2 = b["places"][is_shown]
        places = {"predicted": found[2][:, first:], "copied": true_BT2[:, first - 1 : first]}
        sums: dict[str, tuple[float, float]] = {}
        for name, drawn_BTHW3 in pictures.items():
            away = (drawn_BTHW3.float() - truth_BTHW3[:, first:].float()) / 255.0
            sums[f"squared_{name}"] = (float(away.square().sum()), away.numel())
            error_BT = FRAME_SIZE / 2 * (places[name] - true_BT2[:, first:]).norm(dim=2)
            sums[f"away_{name}"] = (float(error_BT.nansum()), float((~error_BT.isnan()).sum()))
        strips = part.tensors["strips"][:, list(STRIP_FRAMES)]
        return replace(part, sums=sums, tensors={**part.tensors, "strips": strips})

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Return a classifier's metrics, and PSNR and ball error of predicted and copied ends."""
        metrics = dict(TrainClipClassifier.summarize(self, parts, out))
        shown = [part for part in parts if part.sums]
        for name in ("predicted", "copied") if shown else ():
            metrics[f"{name}_psnr"] = psnr(shown, f"squared_{name}")
            away, count = (sum(part.sums[f"away_{name}"][k] for part in shown) for k in (0, 1))
            if count:
                metrics[f"{name}_ball_error_pixels"] = away / count
        return metrics

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Draw clips.jpg and generated clips: generated.jpg, and animated in generated.webp."""
        TrainClipClassifier.show(self, m, i, parts, out)
        assert isinstance(m, TokenTransformer)
        samples = self.samples(i, "validation")
        rng, num = torch.Generator(), min(_NUM_DRAWN, len(samples))
        batch = samples.collate([samples.get(k, -1, rng) for k in range(num)])
        labels_B, tokens_BsG = batch["labels"], batch["x"].to(i.device)
        clips = {
            "true": batch["strips"],
            **_generated(m, tokens_BsG, labels_B.to(i.device), self.config.temperature),
        }
        write_moving(out / "generated.webp", [clip.numpy() for clip in clips.values()], 125)
        pictures = [
            Captioned(
                np.concatenate(list(clips[name][number, list(STRIP_FRAMES)].numpy()), axis=1),
                caption=f"{self.classes[int(label)]}: {name}",
            )
            for number, label in enumerate(labels_B)
            for name in clips
        ]
        write_sheet(out / "generated.jpg", _GENERATED, pictures, num_columns=len(clips))


def _digits_loss(levels: Sequence[int], guesses_MtGV: Tensor, codes_MtG: Tensor) -> Tensor:
    """Return the cross-entropy of guessed codes, (M, t, G), summed over a code's dimensions."""
    losses = []
    rest = codes_MtG.flatten()
    for level, logits_MtGL in zip(levels, torch.split(guesses_MtGV, list(levels), -1), strict=True):
        logits = logits_MtGL.flatten(0, 2)
        losses.append(F.cross_entropy(logits, rest % level, reduction="none"))
        rest = rest // level
    return torch.stack(losses).sum(dim=0).view(codes_MtG.shape)


def _hidden(codes_MtG: Tensor) -> tuple[Tensor, Tensor]:
    """Draw which tokens to hide, (M, t, G), and which clips get a hint of the last step, (M).

    As in MaskGIT, the share is cos(u pi / 2), with u uniform per clip. It applies to the entire
    clip, to what follows its first steps (frame prediction, half of the clips) or to what follows
    the first step alone (interpolation).
    """
    num_clips, num_steps, _ = codes_MtG.shape
    device = codes_MtG.device
    share_M = torch.cos(torch.rand(num_clips, device=device) * (math.pi / 2))
    hidden_MtG = torch.rand(codes_MtG.shape, device=device) < share_M[:, None, None]
    # 0: the entire clip, 1 (twice as likely): frame prediction, 2: interpolation.
    task_M = (torch.randint(0, 4, (num_clips,), device=device) + 1) // 2
    given_M = torch.randint(1, num_steps, (num_clips,), device=device)
    given_M = torch.stack([torch.zeros_like(given_M), given_M, torch.ones_like(given_M)])[
        task_M, torch.arange(num_clips, device=device)
    ]
    is_given_Mt = torch.arange(num_steps, device=device) < given_M[:, None]
    return hidden_MtG & ~is_given_Mt[..., None], task_M == 2


def _decoded(
    m: TokenTransformer,
    tokens_BsG: Tensor,
    hidden_BtG: Tensor,
    *,
    temperature: float,
    is_hinted: bool = False,
    classes_B: Tensor | None = None,
) -> Tensor:
    """Return all codes, the hidden ones drawn; all clips have hints or none, classes or none."""
    same_B = torch.zeros_like(tokens_BsG[:, 0, 0], dtype=torch.long)
    classes_B = same_B + m.num_classes if classes_B is None else classes_B
    return m.decode(tokens_BsG, hidden_BtG, (same_B + is_hinted).bool(), classes_B, temperature)


def _generated(
    m: TokenTransformer, tokens_BsG: Tensor, labels_B: Tensor, temperature: float
) -> dict[str, Tensor]:
    """Return clips (B, T, H, W, 3) in uint8 on the CPU, by the way they are drawn."""
    nothing_BtG = torch.zeros_like(tokens_BsG[:, :-1], dtype=torch.bool)
    steps = torch.arange(nothing_BtG.shape[1], device=tokens_BsG.device)[:, None]
    decoded = partial(_decoded, m, tokens_BsG, temperature=temperature)
    codes = {
        "reconstructed": tokens_BsG[:, :-1].long(),
        "second half predicted": decoded(nothing_BtG | (steps >= len(steps) // 2)),
        "all but the ends interpolated": decoded(nothing_BtG | (steps >= 1), is_hinted=True),
        "generated from its class": decoded(~nothing_BtG, classes_B=labels_B),
    }
    return {name: m.draw(each).cpu() for name, each in codes.items()}
