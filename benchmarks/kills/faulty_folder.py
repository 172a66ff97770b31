"""`python -m training` whose store has faults: `python -m benchmarks.kills.faulty_folder run ...`.

The shipped trainer has no option for faults, so this wraps the store that the command opens. It
writes the number of faults to the file that FAULTS names.
"""

import os
import sys
import time
from pathlib import Path

from benchmarks.kills import RATE
from training import main
from training.durable import Store, open_store
from training.proof import Injector, StatusFile, misbehaving


def _open(uri: str) -> Store:
    injector = Injector([StatusFile(Path(os.environ["FAULTS"]))], 0)
    return misbehaving(open_store(uri), injector, RATE, seed=time.monotonic_ns())


if __name__ == "__main__":
    sys.exit(main(open_store=_open))
