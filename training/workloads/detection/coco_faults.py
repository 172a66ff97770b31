"""Every rule that a dataset in COCO's format is checked by, and the collection of what broke them.

Refused is what would break training or make its figures false; the rest is warned of.
"""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeGuard

from training.data_report import DataFinding, DataReport
from training.errors import UserError

# Rule -> what to do. The sentence before it is made where the fault is found.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "layout": "lay the files out as annotations/instances_train.json and train/IMAGE",
        "json": "export it again",
        "structure": "export it as COCO (object detection)",
        "record": "export it again",
        "id": "give integer ids",
        "duplicate-image-id": "give each image an id of its own",
        "duplicate-file": "list each image once",
        "duplicate-category": "give each category an id and a name of its own",
        "no-categories": "name at least one category",
        "no-images": "give it images",
        "no-objects": "give it objects to learn or to be measured by",
        "other-categories": "give every split the same categories",
        "unknown-image": "add the image, or leave its annotations out",
        "unknown-category": "add the category, or leave its annotations out",
        "absolute-path": "give paths relative to the folder of the images",
        "missing-file": "copy the images there",
        "unreadable-image": "replace the file, or leave the image out",
        "pixel-format": "save it with 8 bits per channel",
        "too-large": "divide it into tiles",
        "image-size": "correct the size, or the boxes that were drawn on another one",
        "box": "give [x, y, width, height] in pixels",
        "box-size": "give [x, y, width, height] in pixels",
        "box-corners": "these look like two corners [x1, y1, x2, y2]; give [x, y, width, height]",
        "box-relative": "these look like shares of the image; give pixels",
        "box-outside": "correct the boxes, or leave them out",
        "mask": "export the annotation again, or give it a bbox",
        "area": "give an area of 0 or more, or leave it out",
        "crowd": "give iscrowd 0 or 1",
        "leak": "remove them from one of the two splits, or the validation's figures are false",
    }
)
WARNED: Mapping[str, str] = MappingProxyType(
    {
        "unread-file": "move it away, or give it the name of a split",
        "duplicate-annotation-id": "nothing here depends on it; other tools do",
        "duplicate-annotation": "both are trained on",
        "duplicate-image": "each is trained on",
        "few-leaks": "remove them from one of the two splits",
        "other-shape": "boxes, polygons and circles are learned from",
        "derived-size": "width and height are taken from the file",
        "derived-box": "the box is the mask's extent",
        "derived-area": "the area is that of its mask or box",
        "empty-box": "it is not trained on",
        "clipped-box": "it is trained on up to the border",
        "area-larger": "whether an object counts as small, medium or large depends on it",
        "orientation": "boxes are read as drawn on the pixels as they are stored; "
        "if they were drawn on the upright image, save it upright",
        "upright": "its boxes were drawn on the upright image, so it is read upright",
        "transparency": "the colours below it are read",
        "unlisted-image": "it is not used",
        "unused-category": "its average precision will be 0 or unknown",
        "class-not-in-split": "its average precision will be unknown there",
        "many-objects": "denoising then has one group, which takes memory; a recipe must have more "
        "queries than objects",
    }
)


# Of at most 64 bits, and in one notation only.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


class CocoFaults:
    """Collects faults by rule: how many, and the first of each as an example."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, rule: str, text: str) -> None:
        """Note one fault: where and what, without what to do."""
        assert rule in REFUSED or rule in WARNED, rule
        # A file may have any bytes as its name, and JSON half a character: neither can be printed.
        printable = text.encode(errors="backslashreplace").decode()
        self._found.setdefault(rule, []).append(printable)

    @property
    def is_refused(self) -> bool:
        """Whether anything would break training."""
        return not REFUSED.keys().isdisjoint(self._found)

    def findings(self) -> list[DataFinding]:
        """One finding for each broken rule, refusals first."""
        return [
            DataFinding(
                rule=rule,
                is_refused=rules is REFUSED,
                count=len(found),
                message=f"{found[0]}{_more(len(found) - 1)}; {rules[rule]}",
            )
            for rules in (REFUSED, WARNED)
            for rule in rules
            if (found := self._found.get(rule))
        ]

    def refuse(self) -> None:
        """Raise UserError if anything would break training."""
        DataReport(findings=self.findings(), tables={}).refuse()


def _more(count: int) -> str:
    return f" (and {count:,} more)" if count else ""


def exact_id(value: object) -> int | None:
    """An id as an integer, if it is one in any notation: 7, 7.0 and "7", but not "007" or 7.5."""
    if type(value) is int:  # as nearly all are
        return value if -(2**63) <= value < 2**63 else None
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return exact_id(int(value))
    # Above 2^53 a float does not tell which integer was meant.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2.0**53:
        return int(value)
    return None


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string of whole characters: JSON may have half of one, as in "\\ud83d"."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def finite(value: object) -> float | None:
    """A number that can be computed with, or None."""
    if type(value) is int and abs(value) < 2**1000:
        value = float(value)
    return value if isinstance(value, float) and math.isfinite(value) else None


def refuse_layout(text: str) -> UserError:
    """The refusal of a folder in which nothing can be found."""
    return UserError(f"{text}; {REFUSED['layout']}")
