"""`python -m benchmarks.detection CONTENDER`: one contender; see benchmarks/detection/table.py."""

import sys

from benchmarks.detection.contender import main

if __name__ == "__main__":
    sys.exit(main())
