"""Benchmarks against peers, side by side in one run, as ratios; results: benchmarks/LOG.md."""

from pathlib import Path

import contract.environment  # noqa: F401

REPOSITORY = Path(__file__).parent.parent
