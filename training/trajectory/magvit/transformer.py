"""A Transformer over the tokens of a clip: guesses masked tokens, and tells the clip's class.

B clips, M of them masked, t token steps in time, G cells of the token grid, D dimensions of a code,
E width, K classes, V the sum of a code's levels. Attention alternates between the cells of one step
and the steps of one cell.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.trajectory.magvit.tokenizer import Quantizer
from training.trajectory.model import motion_tokens


class Block(nn.Module):
    """Attention within each step, then along each cell, then a feed-forward layer; pre-norm."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BtGE: Tensor) -> Tensor:
        x_BtGE = x_BtGE + self.dropout(self._attend(0, self.norms[0](x_BtGE)))
        x_BGtE = self.norms[1](x_BtGE).transpose(1, 2)
        x_BtGE = x_BtGE + self.dropout(self._attend(1, x_BGtE).transpose(1, 2))
        out: Tensor = x_BtGE + self.dropout(self.feed(self.norms[2](x_BtGE)))
        return out

    def _attend(self, number: int, x_BMNE: Tensor) -> Tensor:
        """Attention over N, for each of M sequences."""
        sizes = x_BMNE.shape
        heads = (*sizes[:3], 3, self.num_heads, sizes[3] // self.num_heads)
        q, k, v = self.qkv[number](x_BMNE).view(heads).permute(3, 0, 1, 4, 2, 5).unbind(0)
        x_BMHNd = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out[number](x_BMHNd.transpose(2, 3).reshape(sizes))
        return out


class TokenTransformer(nn.Module):
    """Codes (B, t, G) to class logits (B, K), future position (B, 2), their digits (M, t, G, V).

    The class is read step by step where something moves: cells are pooled by how much their code
    differs from its own mean over time, as the head of the frozen features does.
    """

    def __init__(
        self,
        *,
        quantizer: Quantizer,
        num_steps: int,
        num_cells: int,
        num_classes: int,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.quantizer = quantizer
        num_dimensions = len(quantizer.num_levels)
        self.embed_value = nn.Linear(2 * num_dimensions, width)
        self.mask_E = nn.Parameter(0.02 * torch.randn(width))
        self.time_tE = nn.Parameter(0.02 * torch.randn(num_steps, 1, width))
        self.cell_GE = nn.Parameter(0.02 * torch.randn(num_cells, width))
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        # One code is as many guesses as it has dimensions: 35 logits where 15,360 codes are.
        self.guess = nn.Linear(width, sum(quantizer.num_levels))
        self.sharpness = nn.Parameter(torch.tensor(2.0))
        self.embed_step = nn.Linear(width + num_cells + 5, width)
        self.over_time = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, num_heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm_class = nn.LayerNorm(width)
        self.classify = nn.Linear(width, num_classes)
        self.predict = nn.Linear(width, 2)

    def forward(self, codes_BtG: Tensor, masked_MtG: Tensor | None = None) -> tuple[Tensor, ...]:
        """The mask is of the first M clips, whose codes are guessed; without one none is."""
        codes_BtG = codes_BtG.long()
        masked_BtG = torch.zeros_like(codes_BtG, dtype=torch.bool)
        num_masked = 0
        if masked_MtG is not None:
            num_masked = len(masked_MtG)
            masked_BtG[:num_masked] = masked_MtG
        values_BtGD = self.quantizer.values(codes_BtG) * ~masked_BtG[..., None]
        shown_B1G1 = (~masked_BtG).sum(dim=1, keepdim=True)[..., None].clamp(min=1)
        motion_BtGD = values_BtGD - values_BtGD.sum(dim=1, keepdim=True) / shown_B1G1
        motion_BtGD = motion_BtGD * ~masked_BtG[..., None]
        x_BtGE = self.embed_value(torch.cat([values_BtGD, motion_BtGD], dim=-1))
        x_BtGE = x_BtGE + masked_BtG[..., None] * self.mask_E
        x_BtGE = x_BtGE + self.time_tE + self.cell_GE
        for block in self.blocks:
            x_BtGE = block(x_BtGE)
        x_BtGE = self.norm(x_BtGE)
        logits_BK, future_B2 = self._tell(x_BtGE, motion_BtGD)
        if masked_MtG is None:
            return logits_BK, future_B2
        return logits_BK, future_B2, self.guess(x_BtGE[:num_masked])

    def _tell(self, x_BtGE: Tensor, motion_BtGD: Tensor) -> tuple[Tensor, Tensor]:
        share_BtG, step_features = motion_tokens(motion_BtGD, self.sharpness)
        pooled_BtE = (share_BtG[..., None] * x_BtGE).sum(dim=2)
        y_BtE = self.embed_step(torch.cat([pooled_BtE, *step_features], dim=-1))
        for layer in self.over_time:
            y_BtE = layer(y_BtE + self.time_tE[:, 0])
        y_BtE = self.norm_class(y_BtE)
        last_B2 = 0.5 * step_features[0][:, -1]
        return self.classify(y_BtE.mean(dim=1)), last_B2 + self.predict(y_BtE[:, -1])
