"""The numbers on each line of the seed documents, and how many of them the claims cover.

seed_numbers.csv keeps them, so that the documents need not be there; where they are, a test
compares. Names that have digits in them (g5.2xlarge, A10G, Phase 1) and the numbers of lists are
left out; seed_settings.csv has the numbers that claim nothing, with the reason.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
SEEDS_FOLDER = Path(__file__).parents[4] / "shared" / "seeds"
_NAMES = re.compile(
    r"\b(ml\.)?[a-z]{1,3}\d[a-z]*\.\d*x?large\b"
    r"|\b(A100s?|A10G?|V100|T4|M1/M2|EC2|S3|FP16|FP32|GDDR6|7R32|cu118|python3|pip3)\b"
    r"|\b(Inf[12]|G4dn|[gp][345]|p4de?|trn1|[mct][235])\b"
    r"|ResNet-?\d+|Phase[ _]?\d|Worker 2|ImageNet-1K|x86-64|Step \d|Option \d"
    r"|^\s*(?:#+ )?\d+\. ",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e-?\d+)?")
Numbers = dict[tuple[str, int], list[str]]


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a line, without separators of thousands."""
    return [found.replace(",", "") for found in _NUMBER.findall(_NAMES.sub(" ", text))]


def read_documents(folder: Path = SEEDS_FOLDER) -> Numbers:
    """Return the numbers of each line of the documents, by document and line."""
    found: Numbers = {}
    for path in sorted(folder.glob("*.txt")):
        # Lines end with \n alone; their bytes are not all UTF-8.
        for place, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n"), 1):
            if numbers := numbers_in(line):
                found[path.name[:3], place] = numbers
    return found


def read_listing() -> Numbers:
    """Return what seed_numbers.csv keeps of them."""
    with (FOLDER / "seed_numbers.csv").open(newline="", encoding="utf-8") as lines:
        return {
            (row["seed"], int(row["line"])): row["numbers"].split() for row in csv.DictReader(lines)
        }


def settings() -> list[Mapping[str, str]]:
    """Return the numbers that claim nothing, with the reason."""
    with (FOLDER / "seed_settings.csv").open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def uncovered(
    numbers: Numbers, rows: Iterable[tuple[str, Iterable[int], str]]
) -> list[tuple[str, int, str]]:
    """Return each number that no row writes, as (document, line, number)."""
    written: dict[tuple[str, int], set[str]] = {}
    for seed, lines, text in rows:
        for line in lines:
            written.setdefault((seed, line), set()).update(numbers_in(text))
    return [
        (*place, number)
        for place, found in numbers.items()
        for number in found
        if number not in written.get(place, set())
    ]
