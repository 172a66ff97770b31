"""The head: where did the grid's features move, and a Transformer over time that says what it was.

B batch, T frames, G grid cells (side x side), C channels, K classes, D width, M maps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Channels that the appearance of each cell is reduced to.
_NUM_MAPS = 4
_FLOOR = 0.01


class Head(nn.Module):
    """Class logits (B, K) from features (B, T, G, C); T = 1 is the single-frame baseline.

    What moves is found without labels: the energy of each cell's features after the clip's own
    background is taken away, and its expected place (the spatial softmax of Finn et al. 2016,
    arXiv:1509.06113). Both are blind to colour, which a thousand clips would not teach.
    """

    feature_mean_GC: Tensor
    feature_std_GC: Tensor
    motion_std: Tensor
    place_G2: Tensor

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
        axis = torch.linspace(-1.0, 1.0, grid) if grid > 1 else torch.zeros(1)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        self.register_buffer("place_G2", torch.stack([x.flatten(), y.flatten()], dim=1))
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

    @torch.no_grad()
    def set_statistics(self, features_NTGC: Tensor) -> None:
        """Take the scale of the features from training clips; part of the state from then on."""
        features_NTGC = features_NTGC.float()
        self.feature_mean_GC.copy_(features_NTGC.mean(dim=(0, 1)))
        self.feature_std_GC.copy_(features_NTGC.std(dim=(0, 1)) + _FLOOR)
        motion_NTGC = features_NTGC - _background(features_NTGC)
        self.motion_std.copy_(motion_NTGC.std() + 1e-6)

    def forward(self, features_BTGC: Tensor) -> Tensor:
        features_BTGC = features_BTGC.float()
        x_BTD = self.embed(self.tokens(features_BTGC)) + self.time_TD
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BK: Tensor = self.classify(self.norm(x_BTD).mean(dim=1))
        return logits_BK

    def tokens(self, features_BTGC: Tensor) -> Tensor:
        """Per frame: the moving thing's place, its step, its size, the energy map, appearance."""
        motion_BTGC = (features_BTGC - _background(features_BTGC)) / self.motion_std
        energy_BTG = torch.log(motion_BTGC.square().mean(dim=-1) + _FLOOR)
        share_BTG = (self.sharpness * energy_BTG).softmax(dim=-1)
        place_BT2 = 2.0 * share_BTG @ self.place_G2
        step_BT2 = 4.0 * F.pad(place_BT2[:, 1:] - place_BT2[:, :-1], (0, 0, 1, 0))
        size_BT1 = energy_BTG.logsumexp(dim=-1, keepdim=True)
        standard_BTGC = (features_BTGC - self.feature_mean_GC) / self.feature_std_GC
        appearance_BTGM = F.gelu(self.appearance(standard_BTGC))
        parts = [place_BT2, step_BT2, size_BT1, energy_BTG, appearance_BTGM.flatten(2)]
        return torch.cat(parts, dim=-1)


def _background(features_BTGC: Tensor) -> Tensor:
    """What stands still: the mean over time; of a single frame, the mean over its cells."""
    over = 1 if features_BTGC.shape[1] > 1 else 2
    return features_BTGC.mean(dim=over, keepdim=True)
