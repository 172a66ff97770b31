"""Which way to compute experts is fastest on this machine: measured, not looked up.

No rule holds for all: torch's fused grouped product needs compute capability 9.0, and below it is
a loop that waits for the host; padding costs what the tokens' distribution makes it cost.
"""

import statistics
import time

import torch
from torch import Tensor

from training.workloads.growth.architecture import ExpertBlock, ModelConfig
from training.workloads.growth.expert_products import ExpertProducts
from training.workloads.growth.experts import ExpertFeedForward

_ROUNDS = 5
# "balanced" is no way to compute, but to measure.
_CANDIDATES: tuple[ExpertProducts, ...] = ("split", "bmm", "grouped_mm")


def choose_products(
    config: ModelConfig,
    *,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    started_with: str | None = None,
) -> ExpertProducts:
    """The fastest way for micro-batches of `num_tokens` tokens, computed in `dtype`.

    `started_with` is kept if this machine can compute so, as another way rounds differently.
    """
    block = max(
        (block for block in config.blocks if isinstance(block, ExpertBlock)),
        key=lambda block: block.hidden,
        default=None,
    )
    if block is None:
        return "split"
    bench = _Bench(config, block, num_tokens, device, dtype)
    if started_with in _CANDIDATES and bench.can(started_with):
        return started_with
    # "split" can be computed everywhere; if it cannot, its error says why.
    bench.step("split")
    able = [products for products in _CANDIDATES if bench.can(products)]
    seconds: dict[ExpertProducts, list[float]] = {products: [] for products in able}
    for _ in range(_ROUNDS):  # in turns: a machine that is busy for a moment slows all
        for products in able:
            seconds[products].append(bench.seconds(products))
    return min(able, key=lambda products: statistics.median(seconds[products]))


class _Bench:
    """One block's experts with tokens that are routed as an untrained router does."""

    def __init__(
        self,
        config: ModelConfig,
        block: ExpertBlock,
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        rng = torch.Generator(device).manual_seed(0)
        with device:
            self._ffn = ExpertFeedForward(config.width, block, config.activation)
            shape = (num_tokens, config.width)
            self._x_ND = torch.randn(shape, generator=rng, requires_grad=True)
        if dtype == torch.float64:
            self._ffn.double()
            self._x_ND = self._x_ND.detach().double().requires_grad_()
        with torch.no_grad():
            for parameter in self._ffn.parameters():
                parameter.normal_(std=0.02, generator=rng)

    def step(self, products: ExpertProducts) -> tuple[Tensor, ...]:
        """Forward and backward."""
        self._ffn.products = products
        is_low = self._dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(self._x_ND.device.type, dtype=self._dtype, enabled=is_low):
            y_ND, _ = self._ffn(self._x_ND)
        parameters = list(self._ffn.experts.parameters())
        return torch.autograd.grad(y_ND, [self._x_ND, *parameters], torch.ones_like(y_ND))

    def can(self, products: ExpertProducts) -> bool:
        """Whether this device and type can; also the first step, which is slower than others."""
        try:
            self.step(products)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def seconds(self, products: ExpertProducts) -> float:
        """Of one step, until the device has done it."""
        self._synchronize()
        began = time.perf_counter()
        self.step(products)
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._x_ND.device.type == "cuda":
            torch.cuda.synchronize(self._x_ND.device)
