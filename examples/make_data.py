"""Make the examples' data: sequences of numbers that follow from their first two.

Run: python examples/make_data.py OUT [--count 16384] [--seed 0]
"""

import argparse
import csv
import random
from pathlib import Path

NUMBERS, LENGTH = 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "sequences.csv").open("w", newline="") as file:
        for _ in range(options.count):
            row = [rng.randrange(NUMBERS), rng.randrange(NUMBERS)]
            while len(row) < LENGTH:
                row.append((row[-1] + 3 * row[-2] + 1) % NUMBERS)
            csv.writer(file).writerow(row)


if __name__ == "__main__":
    main()
