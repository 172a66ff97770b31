"""`python -m tests.training.torture.broken BUG ...`: the torture of an engine with a known bug.

The bugs sit where the engine cannot help it: in the store, in torch, in the randomness.
"""

import itertools
import sys
import threading
import time
from typing import Any

import torch

import training.randomness
from training.run import main
from training.store import FolderStore


def answers_before_it_wrote() -> None:
    """A store whose uploads are done later than it says: checkpoints are published too early."""
    upload, sizes = FolderStore.upload, FolderStore.sizes
    under_way: list[threading.Thread] = []

    def upload_later(self: FolderStore, *arguments: Any) -> Any:
        made = upload(self, *arguments)
        finish = made.finish

        def later() -> None:
            time.sleep(0.15)
            finish()

        def answer() -> None:
            under_way.append(threading.Thread(target=later, daemon=True))
            under_way[-1].start()

        made.finish = answer  # type: ignore[method-assign]
        return made

    def settled_sizes(self: FolderStore, prefix: str) -> dict[str, int]:
        for thread in under_way:
            thread.join()
        return sizes(self, prefix)

    FolderStore.upload = upload_later  # type: ignore[method-assign]
    FolderStore.sizes = settled_sizes  # type: ignore[method-assign]


def draws_noise_that_is_not_derived() -> None:
    """Dropout depends on what this process did before."""
    derive, count = training.randomness.derive_seed, itertools.count()

    def derive_seed(*parts: int | str) -> int:
        return next(count) if parts[0] == "noise" else derive(*parts)

    training.randomness.derive_seed = derive_seed


def forgets_the_optimizer() -> None:
    """A checkpoint whose optimizer is not restored."""
    torch.optim.AdamW.load_state_dict = lambda self, state: None  # type: ignore[method-assign]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.exit(main(["torture", *sys.argv[2:]]))
