"""What a reconstruction is judged by besides its pixels: a frozen network's features, and a critic.

B clips, T frames, H height, W width, C channels.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workloads.trajectory.features import build_backbone, calibrate, normalised
from training.workloads.trajectory.magvit.tokenizer import Tokenizer

# As many frames of a clip are compared, evenly from it.
_NUM_COMPARED = 4
_CRITIC_WIDTH = 32


class JudgedTokenizer(Tokenizer):
    """A tokenizer whose reconstruction is judged while it trains."""

    def __init__(self, *, seed: int, **shape: Any) -> None:
        super().__init__(**shape)
        self.seen = build_backbone("random", seed, "layer2")
        widths = (3, *(multiple * _CRITIC_WIDTH for multiple in (1, 2, 4)))
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv3d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.critic = nn.Sequential(*layers, nn.Conv3d(widths[-1], 1, 3, padding=1))

    def train(self, mode: bool = True) -> "JudgedTokenizer":
        """Train or evaluate; what a frozen network sees does not depend on the batch."""
        super().train(mode)
        self.seen.eval()
        return self

    def start_judging(self, weights: str, clips_BTHW3: Tensor) -> None:
        """Take ImageNet's weights, or set the statistics of random ones from training clips."""
        if weights == "pretrained":
            self.seen.load_state_dict(build_backbone(weights, 0, "layer2").state_dict())
        else:
            every = clips_BTHW3.shape[1] // _NUM_COMPARED
            calibrate(self.seen, normalised(clips_BTHW3[:, ::every].flatten(0, 1)))

    def judge(self, pixels_BTHW3: Tensor, clips_BTHW3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each clip (B): how far features are apart, what the critic says, and its own loss.

        The distance is that of Johnson et al. 2016 (arXiv:1603.08155); the critic has the hinge
        loss, and its patches are judged one by one (Isola et al. 2017, arXiv:1611.07004).
        """
        every = clips_BTHW3.shape[1] // _NUM_COMPARED
        found, truth = (
            self.seen(normalised(each[:, ::every].flatten(0, 1)))
            for each in (255.0 * pixels_BTHW3.float(), clips_BTHW3)
        )
        apart_B = (found - truth).square().mean(dim=(1, 2, 3)).view(len(clips_BTHW3), -1).mean(1)
        fake_BCTHW = 2.0 * pixels_BTHW3.permute(0, 4, 1, 2, 3) - 1.0
        real_BCTHW = clips_BTHW3.permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0
        # The tokenizer pleases the critic as it is; only the critic's own loss changes the critic.
        as_it_is = {name: p.detach() for name, p in self.critic.named_parameters()}
        praise = torch.func.functional_call(self.critic, as_it_is, (fake_BCTHW,))
        mistaken = F.relu(1.0 - self.critic(real_BCTHW)) + F.relu(
            1.0 + self.critic(fake_BCTHW.detach())
        )
        return apart_B, -praise.flatten(1).mean(1), mistaken.flatten(1).mean(1)

    def forward(self, clips_BTHW3: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """As a tokenizer; in training followed by what `judge` says."""
        pixels_BTHW3, quantized_BthwD = super().forward(clips_BTHW3)
        if not self.training:
            return pixels_BTHW3, quantized_BthwD
        return pixels_BTHW3, quantized_BthwD, *self.judge(pixels_BTHW3, clips_BTHW3)
