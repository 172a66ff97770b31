"""Writes the tokens of a split into files of one size, each write at a position that is given.

So an interrupted import overwrites what it wrote after the position that it had kept.
"""

import os
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from training.workloads.growth.text.tokens import shard_name

# 64 MiB of a vocabulary of up to 65,536 tokens: a sync fetches several files at a time.
SHARD_TOKENS = 1 << 25


def write_tokens(
    out: Path,
    split: str,
    first: int,
    tokens_T: NDArray[Any],
    *,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write the split's tokens from number `first` on, and nothing behind them, to the disk."""
    done = 0
    while done < len(tokens_T):
        number, there = divmod(first + done, shard_tokens)
        part = tokens_T[done : done + shard_tokens - there]
        path = out / shard_name(split, number)
        with path.open("r+b" if there else "wb") as file:
            file.seek(there * part.itemsize)
            file.write(part.tobytes())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        done += len(part)
