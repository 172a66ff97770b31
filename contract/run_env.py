"""run.env: the variables that the launch template writes and boot reads, and their valid values.

userdata/run.env.example documents each of them; a test compares it with this file.
"""

import re
from typing import Literal, TypeAlias, get_args

from contract.errors import UserError
from contract.trainer_options import check_option, read_words

Name: TypeAlias = Literal[
    "RUN_ID",
    "WORKLOAD",
    "RECIPE",
    "OVERRIDES",
    "PREDICTION",
    "DATASET_URI",
    "RUN_URI",
    "BUNDLE_URI",
    "DATA_MOUNT",
    "DATA_ON",
    "DATA_DEVICE_NAME",
    "NUM_GPUS",
    "TRAINER_OPTIONS",
    "NOTICE_BUDGET_SECONDS",
    "DATASET_WAIT_SECONDS",
    "STACK_NAME",
    "AWS_REGION",
    "FLEET_PARAMETER",
]
# In the order of writing.
NAMES: tuple[Name, ...] = get_args(Name)

# What DATA_MOUNT holds: the volume of the launch template, or the machine's own disks.
DATA_PLACES = ("ebs", "nvme")

_S3_URI = (r"s3://[^/\s]+/\S+", "s3://bucket/key")
_SECONDS = (r"0*[1-9]\d*(\.\d+)?|0\.\d*[1-9]\d*", "a number of seconds above 0")
_WORDS = (r'"[^"$`\\]*"', '"a=b c=d" in double quotes')
_PATH = (r"/[^\s\"']+", "an absolute path")
_WORD = (r"[^\s\"'$`\\]+", "one word without quotes")
_SHAPES: dict[str, tuple[str, str]] = {
    "OVERRIDES": _WORDS,
    "PREDICTION": _WORDS,
    "TRAINER_OPTIONS": _WORDS,
    "DATASET_URI": _S3_URI,
    "RUN_URI": _S3_URI,
    "BUNDLE_URI": _S3_URI,
    "DATA_MOUNT": _PATH,
    "DATA_ON": ("|".join(DATA_PLACES), " or ".join(DATA_PLACES)),
    "FLEET_PARAMETER": _PATH,
    "NUM_GPUS": (r"\d+", "a number"),
    "NOTICE_BUDGET_SECONDS": _SECONDS,
    "DATASET_WAIT_SECONDS": (r"\d+(\.\d+)?", "a number of seconds"),
}


def find_fault(name: str, value: str) -> str | None:
    """Return what is wrong with a variable's value, in one sentence; None if it is valid."""
    pattern, wanted = _SHAPES.get(name, _WORD)
    if not re.fullmatch(pattern, value):
        return f"{name} must be {wanted}, got {value!r}"
    if name == "TRAINER_OPTIONS":
        try:
            for option, text in read_words(value.strip('"')).items():
                check_option(option, text)
        except UserError as error:
            return f"{name}: {error}"
    return None
