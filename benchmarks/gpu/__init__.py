"""`python -m benchmarks gpu`: all measurements that need a GPU, in at most eight minutes.

Each measurement runs in its own process (`python -m benchmarks.gpu NAME`), so that one that fails
or hangs does not affect the others. `--cpu` is a dry run with tiny sizes, which tests the program.
"""

from importlib.util import find_spec
from pathlib import Path


def stand_ins() -> list[str]:
    """Return the folders to add to the path in place of missing packages that the trainer uses."""
    return [] if find_spec("safetensors") else [str(Path(__file__).parent / "stand_in")]
