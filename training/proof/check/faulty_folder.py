"""`python -m training` whose store has faults: `-m training.proof.check.faulty_folder run ...`.

The shipped trainer has no option for faults, so this wraps the store that the command opens. It
writes the number of faults to the file that FAULTS names; FAULT_RATE is their share.
"""

import os
import sys
import time
from pathlib import Path

from training import main
from training.durable import Store, open_store
from training.proof.injector import Injector, StatusFile, misbehaving


def _open(uri: str) -> Store:
    injector = Injector([StatusFile(Path(os.environ["FAULTS"]))], 0)
    rate = float(os.environ["FAULT_RATE"])
    return misbehaving(open_store(uri), injector, rate, seed=time.monotonic_ns())


if __name__ == "__main__":
    sys.exit(main(open_store=_open))
