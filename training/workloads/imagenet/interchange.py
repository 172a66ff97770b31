"""torchvision's and timm's weights, whose names the networks keep: read, and written."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_OURS = "network."
_COUNTERS = "num_batches_tracked"


def from_library(m: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The state of `m` from a library's; with other classes the head stays new, which is said."""
    own = m.state_dict()
    found = {_OURS + name: tensor for name, tensor in tensors.items()}
    # They count batches, which no layer here depends on; some files leave that out.
    counters = {name: t for name, t in own.items() if name.endswith(_COUNTERS)}
    if not own.keys() - counters.keys() <= found.keys():
        return None
    # The last layer's weight, and its bias.
    last = own[[name for name, t in own.items() if t.ndim > 1][-1]].shape
    head = [n for n in own if own[n].shape != found.get(n, own[n]).shape]
    if head and all(own[n].shape[:1] == last[:1] for n in head):
        theirs, ours = found[head[0]].shape[0], last[0]
        _log.info("[weights] %d classes there and %d here: the last layer is new", theirs, ours)
        found |= {name: own[name] for name in head}
    return {**counters, **found}


def write_for_library(m: nn.Module, out: Path) -> None:
    """A safetensors file that torchvision's or timm's model of this name loads strictly."""
    state = {name.removeprefix(_OURS): tensor for name, tensor in m.state_dict().items()}
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
