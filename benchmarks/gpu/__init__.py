"""`python -m benchmarks gpu`: what only a GPU can say, in one table and at most eight minutes.

Each measurement is a process of its own (`python -m benchmarks.gpu NAME`), so that one that fails
or hangs costs no other. `--cpu` is a dry run of all of it with tiny sizes: it tests the program.
"""

from importlib.util import find_spec
from pathlib import Path


def stand_ins() -> list[str]:
    """The folders to add to the path for what the trainer uses of a package that is not here."""
    return [] if find_spec("safetensors") else [str(Path(__file__).parent / "stand_in")]
