"""Ours against peers, side by side in one run, as ratios; benchmarks/LOG.md logs the results."""

from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
