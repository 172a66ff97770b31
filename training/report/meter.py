"""GPU memory and cost of an attempt so far, for the progress line."""

import time
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """Measures one attempt from now on. The price is given: training has no price list."""

    usd_per_hour: float | None = None
    began: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        """GPU memory if there is a GPU, dollars if there is a price; starts with a comma."""
        parts = []
        if torch.cuda.is_available():
            parts.append(f"GPU memory peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        if self.usd_per_hour is not None:
            dollars = (time.monotonic() - self.began) / 3600 * self.usd_per_hour
            parts.append(f"{dollars:.4f} dollars so far (this attempt, {self.usd_per_hour:g}/h)")
        return "".join(f", {part}" for part in parts)
