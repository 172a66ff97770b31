"""`python -m benchmarks.gpu NAME`: one measurement, as JSON lines; see benchmarks/gpu/table.py."""

import argparse
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.session import Session
from benchmarks.gpu.table import MEASUREMENTS


def main() -> int:
    """Run the measurement, which prints its rows as they come."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    module = import_module(f"benchmarks.gpu.{MEASUREMENTS[arguments.name][0]}")
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        session = Session(
            device=torch.device("cpu") if arguments.cpu else torch.device("cuda", 0),
            folder=Path(name),
            deadline=time.monotonic() + arguments.seconds,
        )
        getattr(module, arguments.name)(session)
    return 0


if __name__ == "__main__":
    sys.exit(main())
