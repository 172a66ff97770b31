"""One contender in a process of its own: attention's forward and backward, or a step of a detector.

`python -m benchmarks.gpu.detection_contender JSON` warms up, makes steps and prints what they took.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.gpu import detection_peers as peers
from benchmarks.gpu.detection_peers import NUM_CLASSES, NUM_OBJECTS, SCALES, Scale
from training.workloads.detection.architecture import LossWeights
from training.workloads.detection.attention import Implementation, deformable_attention
from training.workloads.detection.denoising import denoising
from training.workloads.detection.detector import Detector
from training.workloads.detection.losses import criterion

Part: TypeAlias = Literal["encoder attention", "decoder attention", "step"]
Step: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """What one process computes, and how."""

    who: Literal["ours", "transformers"]
    part: Part
    scale: str
    device: str
    implementation: str = ""  # of the attention; "compiled" of a peer's
    with_denoising: bool = True

    @property
    def is_ours(self) -> bool:
        """Whether it is this project's."""
        return self.who == "ours"

    @property
    def name(self) -> str:
        """For the table."""
        plain = self.part == "step" and self.is_ours and not self.with_denoising
        parts = (self.who, self.implementation, "without denoising" if plain else "")
        return ", ".join(part for part in parts if part)


class Runner:
    """A contender's tensors and what it does with them."""

    def __init__(self, contender: Contender) -> None:
        self._device = torch.device(contender.device)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        make = _step if contender.part == "step" else _attention
        self._step, self.parameters = make(contender, SCALES[contender.scale], self._device)

    def steps(self, count: int) -> dict[str, Any]:
        """Make steps; their median seconds, the last result, and the peak of GPU memory in MiB."""
        is_gpu = self._device.type == "cuda"
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        seconds, result = [], 0.0
        for _ in range(count):
            began = time.perf_counter()
            result = self._step().item()  # waits for the device
            if is_gpu:
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated(self._device) if is_gpu else 0
        return {
            "seconds": statistics.median(seconds),
            "result": result,
            "mib": peak // 2**20,
            "parameters": self.parameters,
        }


def _attention(contender: Contender, scale: Scale, device: torch.device) -> tuple[Step, int]:
    """Forward and backward of one layer, on random values, in float32."""
    given = _inputs(scale, contender.part, device)
    dout = torch.randn(len(given[0]), given[1].shape[1], scale.architecture.width, device=device)

    def ours(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        how = cast(Implementation, contender.implementation)
        return deformable_attention(value, scale.shapes, locations, weights, how)

    is_compiled = contender.implementation == "compiled"
    attend = ours if contender.is_ours else peers.attention(scale, device, compiled=is_compiled)

    def step() -> Tensor:
        out = attend(*given)
        gradients = torch.autograd.grad(out, given, dout)
        return sum((each.abs().mean() for each in gradients), out.detach().abs().mean())

    return step, 0


def _inputs(scale: Scale, part: Part, device: torch.device) -> list[Tensor]:
    """An encoder's queries look around their own token, a decoder's around boxes anywhere."""
    a, shapes = scale.architecture, scale.shapes
    points = (a.num_heads, a.num_levels, a.num_points)
    tokens = sum(height * width for height, width in shapes)
    if part == "encoder attention":
        centres = [
            torch.cartesian_prod((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w).flip(1)
            for h, w in shapes
        ]
        centre_BQ2 = torch.cat(centres).expand(scale.images, -1, -1)
    else:
        centre_BQ2 = torch.rand(scale.images, a.num_queries + 2 * a.denoising_queries, 2)
    pixels_L12 = torch.tensor([[(width, height)] for height, width in shapes])
    offsets = 2 * torch.randn(*centre_BQ2.shape[:2], *points, 2) / pixels_L12
    weights = torch.rand(*centre_BQ2.shape[:2], *points)
    given = (
        torch.randn(scale.images, tokens, a.num_heads, a.head_width),
        centre_BQ2[:, :, None, None, None] + offsets,
        weights / weights.sum(dim=(-1, -2), keepdim=True),
    )
    return [each.to(device).requires_grad_() for each in given]


def _step(contender: Contender, scale: Scale, device: torch.device) -> tuple[Step, int]:
    """An optimizer step on one batch; on a GPU in bfloat16."""
    with device:
        model, loss_of = _ours(contender, scale) if contender.is_ours else peers.detector(scale)
    model.train()
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randint(256, (scale.images, 3, scale.height, scale.width), dtype=torch.uint8)
    labels = torch.randint(NUM_CLASSES, (scale.images, NUM_OBJECTS))
    boxes = 0.1 + 0.2 * torch.rand(scale.images, NUM_OBJECTS, 4)
    batch = (images.to(device), labels.to(device), boxes.to(device))

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, sum(parameter.numel() for parameter in model.parameters())


def _ours(contender: Contender, scale: Scale) -> tuple[nn.Module, peers.LossOf]:
    a = scale.architecture
    if not contender.with_denoising:
        a = replace(a, denoising_queries=0)
    model = Detector(a, cast(Implementation, contender.implementation))

    def loss(images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        noise = denoising(labels, boxes, a) if a.denoising_queries else None
        sizes = torch.tensor([images.shape[2:]] * len(images), device=images.device)
        found = model(images, sizes, noise)
        return criterion(found, labels, boxes, LossWeights()).total / labels.numel()

    return model, loss


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    _runner = Runner(Contender(**_given["contender"]))
    _runner.steps(_given["warm_steps"])
    print(json.dumps(_runner.steps(_given["num_steps"])), flush=True)
