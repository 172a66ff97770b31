"""Published weights: ImageNet's for the backbone, and IDEA-Research/DINO's detectors.

python -m training.workloads.detection.published theirs.pth dino.safetensors --classes coco
python -m training run --workload detection --init-from dino.safetensors ...
"""

import argparse
import pickle
import re
import sys
import urllib.error
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from contract.errors import Exit, UserError
from training.durable import RunFailedError
from training.workloads.detection.config import Architecture
from training.workloads.detection.detector import Detector

# A name here is theirs with each pattern on the left replaced by the text on the right.
_NAMES = (
    (r"^backbone\.0\.body\.", "backbone."),
    (r"^label_enc\.", "labels."),
    (r"^transformer\.tgt_embed\.", "queries."),
    (r"^transformer\.level_embed$", "encoder.level_embed"),
    (r"^transformer\.enc_output\.", "selection.project."),
    (r"^transformer\.enc_output_norm\.", "selection.norm."),
    (r"^transformer\.enc_out_class_embed\.", "selection.class_head."),
    (r"^transformer\.enc_out_bbox_embed\.", "selection.box_head."),
    (r"^transformer\.decoder\.ref_point_head\.", "decoder.place_head."),
    (r"^class_embed\.0\.", "decoder.class_head."),
    (r"^bbox_embed\.0\.", "decoder.box_head."),
    (r"^transformer\.(encoder|decoder)\.", r"\1."),
    (r"^(.*layers\.\d+)\.(linear\d\..*)", r"\1.ffn.\2"),
    (r"^(encoder\.layers\.\d+)\.norm1\.", r"\1.self_attn_norm."),
    (r"^(encoder\.layers\.\d+)\.norm2\.", r"\1.ffn_norm."),
    # Their decoder's norm1 belongs to the attention to the image, although that comes second.
    (r"^(decoder\.layers\.\d+)\.norm1\.", r"\1.cross_attn_norm."),
    (r"^(decoder\.layers\.\d+)\.norm2\.", r"\1.self_attn_norm."),
    (r"^(decoder\.layers\.\d+)\.norm3\.", r"\1.ffn_norm."),
)
# Their layers all share the same two heads, which appear once per layer.
_AGAIN = re.compile(
    r"^(transformer\.decoder\.(class|bbox)_embed\.\d+|(class|bbox)_embed\.[1-9]\d*)\."
)
_BY_CLASS = re.compile(r"^labels\.|\bclass_head\.")
# COCO's category ids, which are the rows of published detectors' heads; ten of 1 to 90 are unused.
_COCO_IDS = tuple(sorted(set(range(1, 91)) - {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a published checkpoint to the weights of a detector here."""
    parser = argparse.ArgumentParser(
        prog="python -m training.workloads.detection.published",
        description="Turn a checkpoint of IDEA-Research/DINO (4 scales, ResNet-50) into a file for "
        "`python -m training run --workload detection --init-from FILE`.",
    )
    parser.add_argument("checkpoint", type=Path, help="a published .pth or its safetensors copy")
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    parser.add_argument(
        "--classes",
        required=True,
        help="coco: the 80 classes it was trained on; or the number of your own classes",
    )
    parser.add_argument("--num-queries", type=int, default=900, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        _convert(options)
    except (UserError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return Exit.USER
    return Exit.FINISHED


def _convert(options: argparse.Namespace) -> None:
    rows = _COCO_IDS if options.classes == "coco" else None
    if rows is None and not options.classes.isdigit():
        raise UserError(f"--classes is {options.classes!r}; pass coco or a number of classes")
    state = _read_published(options.checkpoint)
    # Class heads that start from scratch are the same in every conversion.
    torch.manual_seed(0)
    num_classes = len(rows) if rows else int(options.classes)
    detector = Detector(Architecture(num_classes=num_classes, num_queries=options.num_queries))
    _load_published(detector, state, rows)
    own = detector.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in own.items()}, options.out)
    print(f"{options.out}: {len(state)} tensors read, {num_classes} classes")


def load_backbone(detector: Detector) -> None:
    """Fill the backbone with torchvision's ImageNet weights, which it fetches and verifies."""
    from torchvision.models import get_model_weights

    name = detector.architecture.backbone
    weights = get_model_weights(name)["IMAGENET1K_V1"]
    try:
        state = weights.get_state_dict(progress=False, check_hash=True)
    except (urllib.error.URLError, OSError) as error:
        raise RunFailedError(
            f"the pretrained {name} could not be fetched ({error}); allow the download, or start "
            "a run with --override weights=random"
        ) from error
    known = detector.backbone.state_dict()
    detector.backbone.load_state_dict({name: state[name] for name in known})


def _read_published(path: Path) -> Mapping[str, Tensor]:
    """Read the state dict of a published checkpoint (.pth), or of its safetensors copy."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; pass the file of a published checkpoint")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if not zipfile.is_zipfile(path):
            raise RuntimeError("torch.save writes another format")
        # The file also holds their arguments.
        with torch.serialization.safe_globals([argparse.Namespace]):
            read = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} contains more than tensors and arguments, and could run code; "
            "save its state dict as safetensors and pass that file"
        ) from error
    except (RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{path} is not a readable checkpoint ({error}); download it again"
        ) from error
    state: Mapping[str, Tensor] = read.get("model", read)
    return state


def _load_published(
    detector: Detector, state: Mapping[str, Tensor], rows: Sequence[int] | None = None
) -> None:
    """Fill the detector from a state dict of IDEA-Research/DINO.

    `rows` gives, for each of the detector's classes, its row in theirs: for COCO, the category's
    id. Without it, weights that depend on the classes keep their initial values.
    """
    mine = detector.state_dict()
    found: dict[str, Tensor] = {}
    for theirs, tensor in state.items():
        if _AGAIN.match(theirs):
            continue
        name = _our_name(theirs)
        if name not in mine:
            raise _unlike(f"it has {theirs}, which this one lacks")
        if _BY_CLASS.search(name):
            if rows is None:
                continue
            tensor = tensor[torch.tensor(rows)]
        if name == "queries.weight":
            tensor = tensor[: len(mine[name])]
        if tensor.shape != mine[name].shape:
            raise _unlike(
                f"its {theirs} has the shape {tuple(tensor.shape)}, this one's "
                f"{tuple(mine[name].shape)}"
            )
        found[name] = tensor
    missing = [n for n in mine if n not in found and (rows is not None or not _BY_CLASS.search(n))]
    if missing:
        raise _unlike(f"it lacks {missing[0]}")
    detector.load_state_dict(found, strict=False)


def _our_name(theirs: str) -> str:
    """Return the name of a published tensor in a detector here."""
    name = theirs
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _unlike(what: str) -> UserError:
    return UserError(
        f"the published weights have another architecture: {what}; use the architecture with "
        "which they were trained"
    )


if __name__ == "__main__":
    sys.exit(main())
