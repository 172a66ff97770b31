"""The detector: DINO-4scale (arXiv:2203.03605), with a ResNet, for any number of classes.

In training, the decoder also gets noised true boxes (contrastive denoising): positive ones must
find their object again; negative ones, further away, must find nothing. They come in G groups, each
with one of either kind for every object. B images, H W pixels, S tokens, Q queries, K = G x 2 x N
denoising queries, N objects of the image with most, C classes, D width, L layers.
"""

import math
import sys
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.errors import UserError
from training.workloads.detection.attention import Implementation, constant
from training.workloads.detection.config import GROUPS, Architecture
from training.workloads.detection.decoder import (
    Decoder,
    Encoder,
    MultiScaleAttention,
    Pyramid,
    box_head,
    class_head,
    corners,
    from_corners,
    inverse_sigmoid,
    pyramid,
)


class _Denoising(NamedTuple):
    """Denoising queries. Images with fewer than N objects have some without a label (-1)."""

    labels_BK: Tensor
    boxes_BK4: Tensor
    num_groups: int


def denoising(labels_BN: Tensor, boxes_BN4: Tensor, architecture: Architecture) -> _Denoising:
    """Draw noise from the device's generator, for as many groups as the queries suffice for.

    There is at least one group: images with many objects use more queries than the architecture's.
    """
    num_images, num_objects = labels_BN.shape
    num_groups = max(1, architecture.denoising_queries // max(1, num_objects))
    shape = (num_images, num_groups, 2, num_objects)
    is_object = (labels_BN >= 0)[:, None, None]
    labels_BG2N = labels_BN[:, None, None].expand(shape)
    other_BG2N = torch.randint_like(labels_BG2N, architecture.num_classes)
    # As in the reference, only half of the label noise.
    is_other = torch.rand(shape, device=labels_BN.device) < architecture.label_noise / 2
    labels_BG2N = torch.where(is_other & is_object, other_BG2N, labels_BG2N)
    noise_BG2N4 = torch.rand((*shape, 4), device=boxes_BN4.device)
    # The negatives' corners move one to two times as far as the positives' maximum.
    noise_BG2N4[:, :, 1] += 1
    sign_BG2N4 = torch.randint_like(noise_BG2N4, 2) * 2 - 1
    reach_BN4 = boxes_BN4[..., 2:].repeat(1, 1, 2) * (architecture.box_noise / 2)
    moved_BG2N4 = (
        corners(boxes_BN4)[:, None, None] + noise_BG2N4 * sign_BG2N4 * (reach_BN4[:, None, None])
    )
    boxes_BG2N4 = from_corners(moved_BG2N4.clamp(0, 1))
    # Padding queries start in the middle, with half of the image's size.
    boxes_BG2N4 = torch.where(is_object[..., None], boxes_BG2N4, 0.5)
    return _Denoising(
        labels_BK=labels_BG2N.flatten(1), boxes_BK4=boxes_BG2N4.flatten(1, 3), num_groups=num_groups
    )


def _hidden_queries(noise: _Denoising, num_queries: int) -> Tensor | None:
    """Return which queries (rows) must not see which (columns), denoising first: (K + Q, K + Q).

    Only queries of the same group see a denoising query; others would see the truth.
    """
    num_noised = noise.labels_BK.shape[1]
    if not num_noised:
        return None
    number = torch.arange(num_noised + num_queries, device=noise.labels_BK.device)
    group = torch.where(number < num_noised, number * noise.num_groups // num_noised, -1)
    return (group != group[:, None]) & (group >= 0)


def denoising_targets(labels_BN: Tensor, num_groups: int) -> Tensor:
    """Return the true labels (B, G, 2, N) of the denoising queries: -1 for negative ones."""
    labels_BG2N = labels_BN[:, None, None].repeat(1, num_groups, 2, 1)
    labels_BG2N[:, :, 1] = -1
    return labels_BG2N


# ImageNet's statistics, for pixels from 0 to 255.
_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)


class Predictions(NamedTuple):
    """Class logits and boxes: of each decoder layer, of the encoder's selection, of denoising."""

    logits_LBQC: Tensor
    boxes_LBQ4: Tensor
    encoder_logits_BQC: Tensor
    encoder_boxes_BQ4: Tensor
    denoising_logits_LBKC: Tensor
    denoising_boxes_LBK4: Tensor


class Detections(NamedTuple):
    """Each image's best, in descending order; boxes: left, top, right, bottom in its pixels."""

    scores_BN: Tensor
    labels_BN: Tensor
    boxes_BN4: Tensor


class _FrozenBatchNorm2d(nn.Module):
    """Batch norm with constant statistics and scale, folded into the convolution before it."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.zeros(channels))
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the input: the convolution has already applied the norm."""
        return x_BCHW


class _FoldedConv2d(nn.Conv2d):
    """A channels-last convolution that scales and shifts as the norm after it would."""

    scale_C: Tensor
    shift_C: Tensor

    def __init__(self, plain: nn.Conv2d) -> None:
        size, stride, padding = plain.kernel_size, plain.stride, plain.padding
        channels = plain.in_channels, plain.out_channels
        # On "meta", because initializing weights would draw random numbers.
        super().__init__(*channels, size, stride, padding, bias=False, device="meta")  # type: ignore[arg-type]
        weight = plain.weight.detach().contiguous(memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        weight = self.weight * self.scale_C[:, None, None, None]
        return F.conv2d(x_BCHW, weight, self.shift_C, self.stride, self.padding)


def _fold(net: nn.Module) -> list[tuple[_FoldedConv2d, _FrozenBatchNorm2d]]:
    """Replace each convolution that precedes a frozen norm; return the pairs."""
    found = []
    for module in list(net.modules()):
        for (name, plain), (_, norm) in pairwise(list(module.named_children())):
            if isinstance(plain, nn.Conv2d) and isinstance(norm, _FrozenBatchNorm2d):
                folded = _FoldedConv2d(plain)
                setattr(module, name, folded)
                found.append((folded, norm))
    return found


class _Backbone(nn.Module):
    """Maps images to three feature maps."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        is_frozen = architecture.weights == "pretrained"
        net = _resnet(architecture.backbone, _FrozenBatchNorm2d if is_frozen else _group_norm)
        self._folded = _fold(net)
        self.conv1, self.bn1, self.relu, self.maxpool = net.conv1, net.bn1, net.relu, net.maxpool
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            *(net.layer1, net.layer2),
            *(net.layer3, net.layer4),
        )
        # The first linear layer's inputs are the last map's channels.
        self.channels: tuple[int, ...] = tuple(net.fc.in_features // by for by in (4, 2, 1))
        if is_frozen:
            for part in (self.conv1, self.layer1):
                part.requires_grad_(False)

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        if self._folded:
            self._fold_norms()
            images_B3HW = images_B3HW.contiguous(memory_format=torch.channels_last)
        x_BCHW = self.maxpool(self.relu(self.bn1(self.conv1(images_B3HW))))
        x_BCHW = self.layer1(x_BCHW)
        maps = []
        for stage in (self.layer2, self.layer3, self.layer4):
            x_BCHW = stage(x_BCHW)
            maps.append(x_BCHW)
        return maps

    def _fold_norms(self) -> None:
        """Set the convolutions' scales and shifts from their norms, all at once for speed."""
        norms = [norm for _, norm in self._folded]
        scales = torch._foreach_add([norm.running_var for norm in norms], 1e-5)
        torch._foreach_rsqrt_(scales)
        torch._foreach_mul_(scales, [norm.weight for norm in norms])
        shifts = torch._foreach_mul([norm.running_mean for norm in norms], scales)
        shifts = torch._foreach_sub([norm.bias for norm in norms], shifts)
        for (folded, _), scale_C, shift_C in zip(self._folded, scales, shifts, strict=True):
            folded.scale_C, folded.shift_C = scale_C, shift_C


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels)


def _resnet(name: str, norm: object) -> Any:
    try:
        from torchvision.models import get_model
    except ModuleNotFoundError as error:
        raise UserError(
            f"the detector's backbone needs the package {error.name}, which {sys.executable} "
            "lacks; use an image that has it, or install the torchvision that matches torch "
            f"{torch.__version__.partition('+')[0]}"
        ) from error
    return get_model(name, weights=None, norm_layer=norm)


class Detector(nn.Module):
    """Maps images (uint8, 0 outside their valid sizes) to predictions."""

    def __init__(
        self, architecture: Architecture, attention: Implementation = "deterministic"
    ) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.backbone = _Backbone(a)
        self.input_proj = nn.ModuleList(
            _projection(channels, a.width, 1) for channels in self.backbone.channels
        )
        for _ in range(a.num_levels - len(self.input_proj)):
            self.input_proj.append(_projection(self.backbone.channels[-1], a.width, 3))
        self.encoder = Encoder(a)
        self.selection = _Selection(a)
        self.queries = nn.Embedding(a.num_queries, a.width)
        self.labels = nn.Embedding(a.num_classes, a.width)
        self.decoder = Decoder(a)
        self._initialize()
        self.attend_by(attention)

    def attend_by(self, implementation: Implementation) -> None:
        """Use this implementation for all deformable attention."""
        for module in self.modules():
            if isinstance(module, MultiScaleAttention):
                module.implementation = implementation

    @torch.no_grad()
    def _initialize(self) -> None:
        """Initialize like the reference: Glorot, except backbone, heads and label embedding."""
        glorot = [self.encoder.layers, self.selection.project, self.decoder.layers]
        for module in (*glorot, self.decoder.place_head, self.queries):
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)
        for module in self.modules():
            if isinstance(module, MultiScaleAttention):
                module.initialize()
        nn.init.normal_(self.encoder.level_embed)

    def forward(
        self, images_B3HW: Tensor, sizes_B2: Tensor, noise: _Denoising | None = None
    ) -> Predictions:
        encoded = self.encoder(self._features(images_B3HW, sizes_B2))
        encoder_logits_BQC, encoder_boxes_BQ4 = self.selection(encoded)
        # Small images have fewer tokens than there are queries.
        num_queries = encoder_logits_BQC.shape[1]
        x_BQD = self.queries.weight[:num_queries].expand(len(images_B3HW), -1, -1)
        anchors_BQ4 = encoder_boxes_BQ4.detach()
        num_noised, hidden_QQ = 0, None
        if noise is not None:
            num_noised, hidden_QQ = noise.labels_BK.shape[1], _hidden_queries(noise, num_queries)
            # As in the reference, all anchors pass through the clamp of the logits.
            noised_BK4 = inverse_sigmoid(noise.boxes_BK4).sigmoid()
            x_BQD = torch.cat([self._embedded(noise.labels_BK), x_BQD], dim=1)
            anchors_BQ4 = torch.cat([noised_BK4, anchors_BQ4], dim=1)
        logits_LBQC, boxes_LBQ4 = self.decoder(x_BQD, anchors_BQ4, encoded, hidden_QQ)
        return Predictions(
            logits_LBQC=logits_LBQC[:, :, num_noised:],
            boxes_LBQ4=boxes_LBQ4[:, :, num_noised:],
            encoder_logits_BQC=encoder_logits_BQC,
            encoder_boxes_BQ4=encoder_boxes_BQ4,
            denoising_logits_LBKC=logits_LBQC[:, :, :num_noised],
            denoising_boxes_LBK4=boxes_LBQ4[:, :, :num_noised],
        )

    def _features(self, images_B3HW: Tensor, sizes_B2: Tensor) -> Pyramid:
        """Return the backbone's maps in the model's width, and coarser ones made from the last."""
        maps = self.backbone(_normalized(images_B3HW, sizes_B2, self.queries.weight.dtype))
        num = len(maps)
        maps += [maps[-1]] * (len(self.input_proj) - num)
        projected = [project(x) for project, x in zip(self.input_proj, maps, strict=True)]
        height, width = images_B3HW.shape[2:]
        return pyramid(projected, sizes_B2, (height, width))

    def _embedded(self, labels_BK: Tensor) -> Tensor:
        """Embed denoising queries; those without a label are zero."""
        x_BKD = self.labels(labels_BK.clamp(min=0))
        return torch.where((labels_BK >= 0)[..., None], x_BKD, 0)


class _Selection(nn.Module):
    """Mixed query selection: the boxes of the tokens that look most like objects.

    The queries start from these boxes, but their content is learned, not taken from the tokens.
    """

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.num_queries = a.num_queries
        self.project = nn.Linear(a.width, a.width)
        self.norm = nn.LayerNorm(a.width)
        self.class_head = class_head(a)
        self.box_head = box_head(a)

    def forward(self, encoded: Pyramid) -> tuple[Tensor, Tensor]:
        """Return the best tokens' class logits (B, Q, C) and boxes (B, Q, 4)."""
        centres_BS2, sizes_S1 = encoded.centres_BS2, encoded.sizes_S[:, None]
        proposed_BS4 = torch.cat([centres_BS2, sizes_S1.expand(centres_BS2.shape)], dim=-1)
        # Closer to the border, a box's logit could no longer move.
        is_away_BS = ((proposed_BS4 > 0.01) & (proposed_BS4 < 0.99)).all(dim=-1)
        is_candidate_BS = is_away_BS & ~encoded.is_padding_BS
        x_BSD = torch.where(is_candidate_BS[..., None], encoded.tokens_BSD, 0)
        x_BSD = self.norm(self.project(x_BSD))
        logits_BSC = self.class_head(x_BSD)
        score_BS = logits_BSC.detach().amax(dim=-1).masked_fill(~is_candidate_BS, -math.inf)
        num_queries = min(self.num_queries, score_BS.shape[1])
        best_BQ = score_BS.topk(num_queries, dim=1).indices
        at = (torch.arange(len(best_BQ), device=best_BQ.device)[:, None], best_BQ)
        moved_BQ4 = self.box_head(x_BSD[at]) + inverse_sigmoid(proposed_BS4[at])
        return logits_BSC[at], moved_BQ4.sigmoid()


@torch.no_grad()
def postprocess(
    predictions: Predictions, original_sizes_B2: Tensor, num_select: int = 300
) -> Detections:
    """Return the last layer's best pairs of query and class; a query may have several classes."""
    scores_BQC, boxes_BQ4 = (
        predictions.logits_LBQC[-1].float().sigmoid(),
        predictions.boxes_LBQ4[-1],
    )
    num_classes = scores_BQC.shape[2]
    num = min(num_select, scores_BQC[0].numel())
    scores_BN, pair_BN = scores_BQC.flatten(1).topk(num, dim=1)
    image_B1 = torch.arange(len(pair_BN), device=pair_BN.device)[:, None]
    boxes_BN4 = corners(boxes_BQ4)[image_B1, pair_BN // num_classes]
    # Height, width to x, y, x, y.
    scale_B14 = original_sizes_B2.flip(1).repeat(1, 2)[:, None]
    return Detections(
        scores_BN=scores_BN, labels_BN=pair_BN % num_classes, boxes_BN4=boxes_BN4 * scale_B14
    )


def parameter_groups(
    detector: nn.Module, learning_rate: float, backbone_learning_rate: float
) -> list[dict[str, Any]]:
    """Return the published configuration's two groups: the pretrained backbone, and the rest."""
    named = [(name, p) for name, p in detector.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if not n.startswith("backbone.")], "lr": learning_rate},
        {
            "params": [p for n, p in named if n.startswith("backbone.")],
            "lr": backbone_learning_rate,
        },
    ]


def _projection(channels: int, width: int, side: int) -> nn.Sequential:
    """Make a projection to the model's width; with side 3, it halves the map's height and width."""
    convolution = nn.Conv2d(channels, width, side, stride=(side + 1) // 2, padding=side // 2)
    nn.init.xavier_uniform_(convolution.weight)
    nn.init.zeros_(cast(Tensor, convolution.bias))
    return nn.Sequential(convolution, nn.GroupNorm(GROUPS, width))


def _normalized(images_B3HW: Tensor, sizes_B2: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalize pixels by ImageNet's statistics; padding is 0 after this, not before."""
    device = images_B3HW.device
    mean_311, std_311 = (constant(x, device, dtype)[:, None, None] for x in (_MEAN, _STD))
    height, width = (torch.arange(length, device=device) for length in images_B3HW.shape[2:])
    is_valid_BHW = (height < sizes_B2[:, :1])[:, :, None] & (width < sizes_B2[:, 1:])[:, None]
    images_B3HW = (images_B3HW.to(dtype) - mean_311) / std_311
    return torch.where(is_valid_BHW[:, None], images_B3HW, 0)
