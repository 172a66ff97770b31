"""`python -m benchmarks.language CONTENDER`: one contender; see benchmarks/language/table.py."""

import sys

from benchmarks.language.contender import main

if __name__ == "__main__":
    sys.exit(main())
