"""What the machine gives and costs while it trains, for the line that people read."""

import time
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """Of this attempt, from now on. The price is given; training knows no price list."""

    usd_per_hour: float | None = None
    began: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        """GPU memory where there is a GPU, dollars where there is a price; begins with a comma."""
        parts = []
        if torch.cuda.is_available():
            parts.append(f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of the GPU at most")
        if self.usd_per_hour is not None:
            dollars = (time.monotonic() - self.began) / 3600 * self.usd_per_hour
            parts.append(f"{dollars:.4f} dollars so far (this attempt, {self.usd_per_hour:g}/h)")
        return "".join(f", {part}" for part in parts)
