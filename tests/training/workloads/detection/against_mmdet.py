"""The detector beside mmdet's DINO, with the same weights, noise and images: predictions, loss.

pip install --no-deps --target MMDET mmdet==3.3.0 mmengine==0.10.7 mmcv-lite==2.2.0 addict yapf \
    platformdirs termcolor terminaltables shapely opencv-python-headless
python -m tests.training.workloads.detection.against_mmdet MMDET      # exit code 1 if they differ
"""

import importlib.machinery
import re
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.workloads.detection.detectors import SMALL, images
from training.workloads.detection.architecture import LossWeights
from training.workloads.detection.boxes import corners, inverse_sigmoid
from training.workloads.detection.decoder import Decoder
from training.workloads.detection.denoising import Denoising, denoising, hidden_queries
from training.workloads.detection.detector import Detector
from training.workloads.detection.losses import criterion
from training.workloads.detection.pyramid import pyramid

# Theirs has sines for a width of 256 alone.
A = replace(SMALL, width=256, num_heads=8)
_PADDED = 128
_OUR_NAMES = (
    (r"^level_embed", "encoder.level_embed"),
    (r"^bbox_head\.cls_branches\.3\.", "selection.class_head."),
    (r"^bbox_head\.reg_branches\.3\.", "selection.box_head."),
    (r"^bbox_head\.cls_branches\.\d\.", "decoder.class_head."),
    (r"^bbox_head\.reg_branches\.\d\.", "decoder.box_head."),
    (r"box_head\.([024])\.", lambda found: f"box_head.layers.{int(found[1]) // 2}."),
    (r"\.attn\.", "."),
    (r"ffn\.layers\.0\.0\.", "ffn.linear1."),
    (r"ffn\.layers\.1\.", "ffn.linear2."),
    (r"norms\.0\.", "self_attn_norm."),
    (r"(encoder.*)norms\.1\.", r"\1ffn_norm."),
    (r"norms\.1\.", "cross_attn_norm."),
    (r"norms\.2\.", "ffn_norm."),
    (r"ref_point_head", "place_head"),
    (r"^query_embedding", "queries"),
    (r"^memory_trans_fc", "selection.project"),
    (r"^memory_trans_norm", "selection.norm"),
    (r"^dn_query_generator\.label_embedding", "labels"),
)


def main(folder: Path) -> int:
    """Print by how much they differ, without padding and with it."""
    warnings.simplefilter("ignore")
    theirs = _theirs(folder)
    torch.manual_seed(0)
    ours = Detector(A)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    mine, state = ours.state_dict(), theirs.state_dict()
    for name in state:
        if not name.startswith(("backbone", "neck")):
            state[name] = mine[_our_name(name)]
    theirs.load_state_dict(state)
    is_equal = True
    for sizes in ([[128, 128], [128, 128]], [[128, 128], [70, 128], [128, 100]]):
        for what, off in _differences(ours, theirs, torch.tensor(sizes)).items():
            is_equal &= off < 1e-4
            print(f"{len(sizes)} images, {what}: {off:.1e}")
    return 0 if is_equal else 1


def _differences(ours: Detector, theirs: Any, sizes: Tensor) -> dict[str, float]:
    """What differs by how much: absolutely, but loss and gradients relatively."""
    batch = images(*(3, 2, 1)[: len(sizes)])
    labels, boxes = batch.labels, batch.boxes.float()
    maps = [torch.randn(len(sizes), A.width, _PADDED // s, _PADDED // s) for s in (8, 16, 32, 64)]
    places = pyramid(maps, sizes, (_PADDED, _PADDED))
    ours._features = lambda *_: places  # type: ignore[method-assign]
    _take_sines_of_the_padded_image(ours, places.valid_BL2[:, 0].repeat(1, 2)[:, None])
    noise = denoising(labels, boxes, A)
    p = ours(torch.zeros(len(sizes), 3, _PADDED, _PADDED, dtype=torch.uint8), sizes, noise)
    total = criterion(p, labels, boxes, LossWeights()).total / (labels >= 0).sum()

    samples = [_sample(size, *each) for size, *each in zip(sizes, labels, boxes, strict=True)]
    theirs.dn_query_generator = _Noise(ours, noise)
    found = theirs.forward_transformer(maps, samples)
    logits, their_boxes = theirs.bbox_head(found["hidden_states"], found["references"])
    their_total = sum(theirs.bbox_head.loss(batch_data_samples=samples, **found).values())
    pairs = {
        "logits": (torch.cat([p.denoising_logits_LBKC, p.logits_LBQC], dim=2), logits),
        "boxes": (torch.cat([p.denoising_boxes_LBK4, p.boxes_LBQ4], dim=2), their_boxes),
        "encoder's logits": (p.encoder_logits_BQC, found["enc_outputs_class"]),
        "encoder's boxes": (p.encoder_boxes_BQ4, found["enc_outputs_coord"]),
    }
    off = {what: float((a - b).detach().abs().max()) for what, (a, b) in pairs.items()}
    off["loss"] = float((total / their_total - 1).abs())
    name = "encoder.layers.0.self_attn.value_proj.weight"
    mine, their = (
        torch.autograd.grad(loss, dict(model.named_parameters())[name])[0]
        for loss, model in ((total, ours), (their_total, theirs))
    )
    off["gradient of the encoder's first layer"] = float((mine - their).norm() / their.norm())
    return off


def _take_sines_of_the_padded_image(ours: Detector, valid_B14: Tensor) -> None:
    """The one thing that ours does otherwise on purpose: see Decoder._place."""
    place = Decoder._place
    ours.decoder._place = lambda boxes: place(ours.decoder, boxes * valid_B14)  # type: ignore[method-assign]


class _Noise(nn.Module):
    """Gives theirs the denoising queries of ours."""

    def __init__(self, ours: Detector, noise: Denoising) -> None:
        super().__init__()
        self.label_embedding, self.queries = ours.labels, ours._embedded(noise.labels_BK)
        self.noise = noise

    def forward(self, samples: Any) -> tuple[Any, ...]:
        num_groups, num_noised = self.noise.num_groups, self.noise.labels_BK.shape[1]
        about = {"num_denoising_queries": num_noised, "num_denoising_groups": num_groups}
        hidden = hidden_queries(self.noise, A.num_queries)
        return self.queries, inverse_sigmoid(self.noise.boxes_BK4), hidden, about


def _sample(size: Tensor, labels: Tensor, boxes: Tensor) -> Any:
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    about = {"batch_input_shape": (_PADDED, _PADDED), "img_shape": tuple(size.tolist())}
    sample, pixels = DetDataSample(metainfo=about), size.flip(0).repeat(2)
    is_object = labels >= 0
    sample.gt_instances = InstanceData(
        labels=labels[is_object], bboxes=corners(boxes[is_object]) * pixels
    )
    return sample


def _our_name(theirs: str) -> str:
    for pattern, replacement in _OUR_NAMES:
        theirs = re.sub(pattern, replacement, theirs)  # type: ignore[arg-type]
    return theirs


def _theirs(folder: Path) -> Any:
    """Their detector of the same architecture; without mmcv's compiled operators."""
    sys.path.append(str(folder))
    compiled: Any = types.ModuleType("mmcv._ext")
    compiled.__spec__ = importlib.machinery.ModuleSpec("mmcv._ext", None)
    for file in (folder / "mmcv" / "ops").glob("*.py"):
        for name in re.findall(r"'(\w+)'", file.read_text()):
            setattr(compiled, name, None)
    sys.modules["mmcv._ext"] = compiled
    import mmcv

    # The lite package is the newest, of which theirs does not know.
    mmcv.__version__ = "2.1.0"
    import mmdet.models  # noqa: F401 (registers itself)
    from mmdet.registry import MODELS
    from mmengine.config import ConfigDict

    return MODELS.build(ConfigDict(_config()))


def _config() -> dict[str, Any]:
    """mmdet's dino-4scale_r50_8xb2-12e_coco.py in our small numbers."""
    of_attention = {"embed_dims": A.width, "num_heads": A.num_heads, "dropout": 0.0}
    of_points = {**of_attention, "num_levels": A.num_levels, "num_points": A.num_points}
    ffn = {"embed_dims": A.width, "feedforward_channels": A.feed_forward, "ffn_drop": 0.0}
    costs = [
        {"type": "FocalLossCost", "weight": 2.0},
        {"type": "BBoxL1Cost", "weight": 5.0, "box_format": "xywh"},
        {"type": "IoUCost", "iou_mode": "giou", "weight": 2.0},
    ]
    focal = {"type": "FocalLoss", "use_sigmoid": True, "gamma": 2.0, "alpha": 0.25}
    return {
        "type": "DINO",
        "num_queries": A.num_queries,
        "with_box_refine": True,
        "as_two_stage": True,
        "num_feature_levels": A.num_levels,
        "backbone": {"type": "ResNet", "depth": 18, "out_indices": (1, 2, 3)},
        "neck": {
            "type": "ChannelMapper",
            "in_channels": [128, 256, 512],
            "out_channels": A.width,
            "num_outs": A.num_levels,
        },
        "encoder": {
            "num_layers": A.encoder_layers,
            "layer_cfg": {"self_attn_cfg": of_points, "ffn_cfg": ffn},
        },
        "decoder": {
            "num_layers": A.decoder_layers,
            "return_intermediate": True,
            "post_norm_cfg": None,
            "layer_cfg": {
                "self_attn_cfg": of_attention,
                "cross_attn_cfg": of_points,
                "ffn_cfg": ffn,
            },
        },
        "positional_encoding": {
            "num_feats": A.width // 2,
            "normalize": True,
            "offset": 0.0,
            "temperature": 20,
        },
        "bbox_head": {
            "type": "DINOHead",
            "num_classes": A.num_classes,
            "loss_cls": {**focal, "loss_weight": 1.0},
            "loss_bbox": {"type": "L1Loss", "loss_weight": 5.0},
            "loss_iou": {"type": "GIoULoss", "loss_weight": 2.0},
        },
        "dn_cfg": {"group_cfg": {"num_dn_queries": 10}},
        "train_cfg": {"assigner": {"type": "HungarianAssigner", "match_costs": costs}},
        "test_cfg": {"max_per_img": 300},
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
