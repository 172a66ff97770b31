"""torchvision's and timm's ResNets, whose tensors have the same names: read, and written."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from training.errors import UserError

_log = logging.getLogger(__name__)

_OURS = "network."
_HEAD = ("fc.weight", "fc.bias")


def from_resnet(m: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The state of `m` from a ResNet's; with other classes the head stays new, which is said."""
    if "conv1.weight" not in tensors or "fc.weight" not in tensors:
        return None
    own = m.state_dict()
    found = {_OURS + name: tensor for name, tensor in tensors.items()}
    theirs, ours = (state[f"{_OURS}fc.weight"].shape[0] for state in (found, own))
    if theirs != ours:
        _log.info("[weights] %d classes there and %d here: the last layer is new", theirs, ours)
        found |= {_OURS + name: own[_OURS + name] for name in _HEAD}
    # They count batches, which no layer here depends on; some files leave that out.
    counts = {name: t for name, t in own.items() if name.endswith("num_batches_tracked")}
    return {**counts, **found}


def write_resnet(m: nn.Module, out: Path) -> None:
    """A safetensors file that torchvision's and timm's model of this name load strictly."""
    state = {name.removeprefix(_OURS): tensor for name, tensor in m.state_dict().items()}
    if "stem.0.weight" in state or any(".convolution." in name for name in state):
        raise UserError(
            "the model is none of torchvision's: it has the architecture resnet8, or blur_pool; "
            "leave --format out, or give --format torch.export"
        )
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, out)


def write_program(m: nn.Module, out: Path) -> None:
    """torch.export's program of uint8 images (batch, side, side, 3), sides and batch free."""
    from torch.export import Dim, export, save

    images = torch.zeros(2, 64, 64, 3, dtype=torch.uint8)
    sizes = {0: Dim("batch"), 1: Dim.AUTO, 2: Dim.AUTO}
    program = export(m.eval(), (images,), dynamic_shapes=(sizes,))
    with warnings.catch_warnings():
        # Of weights that share memory; all are on the CPU.
        warnings.simplefilter("ignore", UserWarning)
        save(program, out)
