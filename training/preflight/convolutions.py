"""How much of a step's work is convolutions, and which: they run at speeds of their own."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Convolutions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of convolutions, forward and backward: all, grouped, and channels last.

    Depthwise ones are not grouped here: they have kernels of their own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.grouped_flops, self.channels_last_flops = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            # input, weight, bias, stride, padding, dilation, transposed, output padding, groups
            self._add(out, args[0], args[1], args[6], args[8], passes=1)
        elif func is torch.ops.aten.convolution_backward.default:
            # gradient, input, weight, ..., transposed, output padding, groups, output mask
            self._add(args[0], args[1], args[2], args[7], args[9], passes=sum(args[10][:2]))
        return out

    def shares(self, total_flops: int) -> dict[str, float]:
        """Return the shares of a step's FLOPs, as a footprint has them."""
        # torch counts the backward of groups wrongly, so that the total may be too small.
        total = max(total_flops, self.flops, 1)
        return {
            "convolution_share": round(self.flops / total, 3),
            "grouped_share": round(self.grouped_flops / total, 3),
            "channels_last_share": round(self.channels_last_flops / max(self.flops, 1), 3),
        }

    def _add(
        self, out: Tensor, given: Tensor, weight: Tensor, transposed: bool, groups: int, passes: int
    ) -> None:
        pixels = given if transposed else out
        flops = 2 * pixels.numel() * math.prod(weight.shape[1:]) * passes
        self.flops += flops
        self.grouped_flops += flops if groups > 1 and weight.shape[1] > 1 else 0
        last = torch.channels_last if given.ndim == 4 else torch.channels_last_3d
        if given.ndim in (4, 5) and given.is_contiguous(memory_format=last):
            self.channels_last_flops += flops
