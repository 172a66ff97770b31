"""Random state is never stored: it is derived from the seed and the position in the run."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on every part and their order."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def derive_seeds(*parts: int | str) -> Callable[[int], int]:
    """Return `derive_seed(*parts, number)` as a function of the number, at a third of the cost.

    Called once per sample, which matters where a step takes milliseconds.
    """
    prefix = hashlib.blake2b("".join(f"{part}\x1f" for part in parts).encode(), digest_size=8)

    def derive(number: int) -> int:
        digest = prefix.copy()
        digest.update(b"%d" % number)
        return int.from_bytes(digest.digest(), "little") >> 1

    return derive


def shuffled(length: int, epoch: int, seed: int) -> Tensor:
    """Return 0 .. length-1 in an order that is a function of (seed, epoch) alone.

    A tensor takes 8 bytes a sample, a list 40.
    """
    generator = torch.Generator()
    generator.manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(length, generator=generator)


def seed_torch(device: torch.device, *parts: int | str) -> None:
    """Seed the generators that a stage's code draws from: the CPU's and the device's.

    Avoids torch.manual_seed, which formats the entire Python stack at every call where CUDA is not
    in use: 79 microseconds here, 143 from deeper stacks, against 2.6 (training/LOG.md).
    """
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def drawing_from(rng: torch.Generator) -> Iterator[None]:
    """Make code that draws from the generators of torch (CPU), numpy and `random` use `rng`.

    For example torchvision's transforms in `Samples.get`. The generators are restored afterwards.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=rng))
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
