"""A training script in miniature: steps of some CPU time, and two-file checkpoints, not atomic.

It says what it found at its start: a whole pair, a torn one, half a file, or nothing. Standard
library and NumPy; with `--commit` it knows the one line that says when a checkpoint is whole.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

FILES = ("model.bin", "optimizer.bin")
_PIECE = 1 << 20
_SIZE = 320  # of the matrices of a step: some 15 ms


def found(folder: Path, size: int) -> tuple[str, int]:
    """What a folder holds, and the checkpoint's number."""
    if not any((folder / name).exists() for name in FILES):
        return "nothing", 0
    numbers = set()
    for name in FILES:
        path = folder / name
        data = path.read_bytes() if path.exists() else b""
        # Each mebibyte begins with the checkpoint's number.
        heads = {data[at : at + 8] for at in range(0, size, _PIECE)}
        if len(data) != size or len(heads) != 1:
            return "half a file", 0
        numbers |= {int.from_bytes(head, "little") for head in heads}
    return ("whole", numbers.pop()) if len(numbers) == 1 else ("torn pair", 0)


def write(path: Path, number: int, size: int) -> None:
    """Write over a file piece by piece, as torch.save does."""
    noise = np.random.default_rng(number).bytes(_PIECE - 8)
    with path.open("wb") as file:
        for _ in range(size // _PIECE):
            file.write(number.to_bytes(8, "little") + noise)


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=os.environ.get("SM_CHECKPOINT_DIR"))
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--commit", action="store_true")
    options = parser.parse_args()
    size = options.megabytes * _PIECE
    state, number = found(options.folder, size)
    print(json.dumps({"found": state, "number": number}), flush=True)
    frozen = options.folder / "backbone.bin"  # it never changes
    if not frozen.exists():
        write(frozen, 0, 2 * size)
    matrix = np.random.default_rng(0).random((_SIZE, _SIZE), dtype=np.float32)
    while True:
        seconds = []
        for _ in range(options.steps):
            began = time.perf_counter()
            for _ in range(20):
                matrix = matrix @ matrix
                matrix /= np.abs(matrix).max()
            seconds.append(time.perf_counter() - began)
        number += 1
        began = time.perf_counter()
        for name in FILES:
            write(options.folder / name, number, size)
        if options.commit:
            from training.program import commit

            commit()
        saved = time.perf_counter() - began
        print(json.dumps({"wrote": number, "steps": seconds, "saved": saved}), flush=True)


if __name__ == "__main__":
    main()
