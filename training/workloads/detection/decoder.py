"""The decoder: queries look at each other, at the image around their boxes, and move their boxes.

B images, L layers, Q queries, D width, C classes, l levels.
"""

import math
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workloads.detection.architecture import Architecture
from training.workloads.detection.boxes import inverse_sigmoid
from training.workloads.detection.encoder import FeedForward, MultiScaleAttention
from training.workloads.detection.pyramid import Pyramid, sines

_TEMPERATURE = 10_000.0
# A query is an object with this probability, before it has learned: focal loss starts stable.
_PRIOR = 0.01


class Decoder(nn.Module):
    """Queries and their boxes to class logits (L, B, Q, C) and boxes (L, B, Q, 4) of each layer."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.place_head = Perceptron(2 * a.width, a.width, a.width)
        self.layers = nn.ModuleList(DecoderLayer(a) for _ in range(a.decoder_layers))
        self.norm = nn.LayerNorm(a.width)
        self.class_head = class_head(a)
        self.box_head = box_head(a)

    def forward(
        self, x_BQD: Tensor, anchors_BQ4: Tensor, read: Pyramid, hidden_QQ: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Look forward twice: a layer's loss also moves the boxes that the layer before made.

        The layer looks at those boxes detached, and so does the layer after next: no gradient goes
        further back through boxes.
        """
        states, before = [], []
        moved_BQ4 = anchors_BQ4
        for number, layer in enumerate(self.layers):
            if number:
                moved_BQ4 = (self.box_head(x_BQD) + inverse_sigmoid(anchors_BQ4)).sigmoid()
                anchors_BQ4 = moved_BQ4.detach()
            x_BQD = layer(x_BQD, self._place(anchors_BQ4), anchors_BQ4, read, hidden_QQ)
            states.append(self.norm(x_BQD))
            before.append(inverse_sigmoid(moved_BQ4))
        states_LBQD = torch.stack(states)
        boxes_LBQ4 = (self.box_head(states_LBQD) + torch.stack(before)).sigmoid()
        return self.class_head(states_LBQD), boxes_LBQ4

    def _place(self, boxes_BQ4: Tensor) -> Tensor:
        """What a query is told of its box: sines of y, x, w and h, in the reference's order.

        The reference takes them relative to the padded image, so that padding changes what is
        found; without padding it is the same.
        """
        x, y, w, h = boxes_BQ4.unbind(-1)
        sines_BQz = sines(
            torch.stack([y, x, w, h], dim=-1), self.norm.normalized_shape[0] // 2, _TEMPERATURE
        )
        return cast(Tensor, self.place_head(sines_BQz))


class DecoderLayer(nn.Module):
    """Attention among queries, to the image, and the feed-forward network; norms come after."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(
            a.width, a.num_heads, dropout=a.dropout, batch_first=True
        )
        self.self_attn_norm = nn.LayerNorm(a.width)
        self.cross_attn = MultiScaleAttention(a)
        self.cross_attn_norm = nn.LayerNorm(a.width)
        self.ffn = FeedForward(a)
        self.ffn_norm = nn.LayerNorm(a.width)
        self.dropout = nn.Dropout(a.dropout)

    def forward(
        self,
        x_BQD: Tensor,
        place_BQD: Tensor,
        anchors_BQ4: Tensor,
        read: Pyramid,
        hidden_QQ: Tensor | None,
    ) -> Tensor:
        query_BQD = x_BQD + place_BQD
        y_BQD, _ = self.self_attn(
            query_BQD, query_BQD, x_BQD, attn_mask=hidden_QQ, need_weights=False
        )
        x_BQD = self.self_attn_norm(x_BQD + self.dropout(y_BQD))
        # Boxes are relative to the valid image, locations to the padded one.
        valid_B1l4 = read.valid_BL2.repeat(1, 1, 2)[:, None]
        y_BQD = self.cross_attn(x_BQD + place_BQD, anchors_BQ4[:, :, None] * valid_B1l4, read)
        x_BQD = self.cross_attn_norm(x_BQD + self.dropout(y_BQD))
        return cast(Tensor, self.ffn_norm(x_BQD + self.ffn(x_BQD)))


class Perceptron(nn.Module):
    """Linear layers with ReLU in between."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, x_D: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x_D = F.relu(layer(x_D))
        return cast(Tensor, self.layers[-1](x_D))


def class_head(a: Architecture) -> nn.Linear:
    """States to class logits, all of the prior probability plus noise."""
    head = nn.Linear(a.width, a.num_classes)
    nn.init.constant_(head.bias, math.log(_PRIOR / (1 - _PRIOR)))
    return head


def box_head(a: Architecture) -> Perceptron:
    """States to how boxes move: at first not at all."""
    head = Perceptron(a.width, a.width, a.width, 4)
    for parameter in head.layers[-1].parameters():
        nn.init.zeros_(parameter)
    return head
