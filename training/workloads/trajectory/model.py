"""The head over a clip's features, and the small network of the time-average baseline.

B batch, T frames, G grid cells (side x side), C channels, K classes, D width, M maps.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Number of channels to which each cell's appearance is reduced.
_NUM_MAPS = 4
_FLOOR = 0.01


class TransformerHead(nn.Module):
    """Finds where the grid's features move, and classifies the motion by a Transformer over time.

    From features (B, T, G, C) to class logits (B, K) and the future position (B, 2), in half
    frames from the centre. T = 1 is the single-frame baseline.

    Motion is found without labels: the energy of each cell's features after subtracting the clip's
    own background, and its expected place (the spatial softmax of Finn et al. 2016,
    arXiv:1509.06113). Both ignore colour, an invariance that a thousand clips would not teach.
    """

    feature_mean_GC: Tensor
    feature_std_GC: Tensor
    motion_std: Tensor

    def __init__(
        self,
        *,
        num_frames: int,
        grid: int,
        channels: int,
        num_classes: int,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        num_cells = grid * grid
        self.register_buffer("feature_mean_GC", torch.zeros(num_cells, channels))
        self.register_buffer("feature_std_GC", torch.ones(num_cells, channels))
        self.register_buffer("motion_std", torch.ones(()))
        self.sharpness = nn.Parameter(torch.tensor(2.0))
        self.appearance = nn.Linear(channels, _NUM_MAPS)
        self.embed = nn.Linear(num_cells * (1 + _NUM_MAPS) + 5, width)
        self.time_TD = nn.Parameter(0.02 * torch.randn(num_frames, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                num_heads,
                4 * width,
                dropout,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, num_classes)
        self.predict = nn.Linear(width, 2)

    @torch.no_grad()
    def set_statistics(self, features_NTGC: Tensor) -> None:
        """Set the scale of the features, which is part of the state, from training clips."""
        features_NTGC = features_NTGC.float()
        self.feature_mean_GC.copy_(features_NTGC.mean(dim=(0, 1)))
        self.feature_std_GC.copy_(features_NTGC.std(dim=(0, 1)) + _FLOOR)
        motion_NTGC = features_NTGC - _background(features_NTGC)
        self.motion_std.copy_(motion_NTGC.std() + 1e-6)

    def forward(self, features_BTGC: Tensor) -> tuple[Tensor, Tensor]:
        tokens_BTE = self.tokens(features_BTGC.float())
        x_BTD = self.embed(tokens_BTE) + self.time_TD
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        # The future position is predicted relative to the last one.
        last_B2 = 0.5 * tokens_BTE[:, -1, :2]
        return self.classify(x_BTD.mean(dim=1)), last_B2 + self.predict(x_BTD[:, -1])

    def tokens(self, features_BTGC: Tensor) -> Tensor:
        """Per frame: place, step and size of what moves, the energy map, and the appearance."""
        motion_BTGC = (features_BTGC - _background(features_BTGC)) / self.motion_std
        _, motion = motion_tokens(motion_BTGC, self.sharpness)
        standard_BTGC = (features_BTGC - self.feature_mean_GC) / self.feature_std_GC
        appearance_BTGM = F.gelu(self.appearance(standard_BTGC))
        return torch.cat([*motion, appearance_BTGM.flatten(2)], dim=-1)


def motion_tokens(motion_BTGC: Tensor, sharpness: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Locate motion, without labels.

    Returns each cell's share of the motion (B, T, G) and, per frame, the place (B, T, 2), the step
    since the frame before (B, T, 2), the size (B, T, 1) and the energy map (B, T, G).
    """
    side = math.isqrt(motion_BTGC.shape[2])
    # Centres of the cells, in half frames from the centre of the picture.
    axis = (torch.arange(side, device=motion_BTGC.device) + 0.5) * 2.0 / side - 1.0
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    place_G2 = torch.stack([x.flatten(), y.flatten()], dim=1)
    energy_BTG = torch.log(motion_BTGC.square().mean(dim=-1) + _FLOOR)
    share_BTG = (sharpness * energy_BTG).softmax(dim=-1)
    place_BT2 = 2.0 * share_BTG @ place_G2
    step_BT2 = 4.0 * F.pad(place_BT2[:, 1:] - place_BT2[:, :-1], (0, 0, 1, 0))
    size_BT1 = energy_BTG.logsumexp(dim=-1, keepdim=True)
    return share_BTG, (place_BT2, step_BT2, size_BT1, energy_BTG)


def _background(features_BTGC: Tensor) -> Tensor:
    """The static part: the mean over time, or for a single frame the mean over its cells."""
    over = 1 if features_BTGC.shape[1] > 1 else 2
    return features_BTGC.mean(dim=over, keepdim=True)


class MeanImageNet(nn.Module):
    """Class logits (B, K) and future position (B, 2) from mean images (B, 3, 64, 64) in uint8.

    Trained from scratch on the pixels, so that only the missing order limits it. Group norm, so
    that a sample's result does not depend on the rest of its batch.
    """

    def __init__(self, *, num_classes: int, width: int) -> None:
        super().__init__()
        widths = (3, width // 2, width, 2 * width, 2 * width)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1),
                nn.GroupNorm(4, after),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers)
        self.classify = nn.Linear(2 * width, num_classes)
        self.predict = nn.Linear(2 * width, 2)

    def forward(self, images_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        images_B3HW = images_B3HW.float() / 64.0
        # What differs from the image's own mean colour, whatever that is.
        contrast_B3HW = images_B3HW - images_B3HW.mean(dim=(2, 3), keepdim=True)
        x_BD = self.layers(contrast_B3HW).mean(dim=(2, 3))
        return self.classify(x_BD), self.predict(x_BD)
