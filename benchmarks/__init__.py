"""Benchmarks against peers, side by side in one run, as ratios; results: benchmarks/LOG.md."""

from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
