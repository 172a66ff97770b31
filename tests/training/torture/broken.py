"""`python -m tests.training.torture.broken BUG ...`: the torture of an engine with a known bug.

The bugs sit where the engine cannot help it: in the store, in torch, in the randomness.
"""

import itertools
import sys
import threading
import time
from pathlib import Path

import torch

import training.randomness
from training.run import main
from training.store import FolderStore


def answers_before_it_wrote() -> None:
    """A store whose uploads are done later than it says: checkpoints are published too early."""
    write, read = FolderStore._replacing, FolderStore.get_file
    honest = FolderStore.put_file
    under_way: list[threading.Thread] = []

    def put_file(self: FolderStore, key: str, path: Path) -> None:
        if not key.startswith("checkpoints/"):
            honest(self, key, path)
            return
        data = path.read_bytes()

        def later() -> None:
            time.sleep(0.15)
            with write(self, key) as part:
                part.write_bytes(data)

        under_way.append(threading.Thread(target=later, daemon=True))
        under_way[-1].start()

    def get_file(self: FolderStore, key: str, path: Path) -> None:
        for thread in under_way:
            thread.join()
        read(self, key, path)

    FolderStore.put_file = put_file  # type: ignore[method-assign]
    FolderStore.get_file = get_file  # type: ignore[method-assign]


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
