"""run.env: the variables that the launch template writes and boot reads, and what each may be.

userdata/run.env.example documents each of them; a test compares it with this.
"""

import re
from typing import Literal, TypeAlias, get_args

from contract.grammar import parse_interval, parse_kept
from contract.notice import POLICIES

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
    "CHECKPOINT_INTERVAL",
    "CHECKPOINTS_KEPT",
    "NOTICE_BUDGET_SECONDS",
    "NOTICE_POLICY",
    "LEASE_TTL_SECONDS",
    "NAN_RETRIES",
    "NAN_SKIPS",
    "DATASET_WAIT_SECONDS",
    "STACK_NAME",
    "AWS_REGION",
    "FLEET_PARAMETER",
]
# In the order of writing.
NAMES: tuple[Name, ...] = get_args(Name)

# What is mounted at DATA_MOUNT: the volume of the launch template, or the machine's own disks.
DATA_PLACES = ("ebs", "nvme")

_S3_URI = (r"s3://[^/\s]+/\S+", "s3://bucket/key")
_SECONDS = (r"0*[1-9]\d*(\.\d+)?|0\.\d*[1-9]\d*", "a number of seconds above 0")
_COUNT = (r"\d+", "a whole number")
_WORDS = (r'"[^"$`\\]*"', '"a=b c=d" in double quotes')
_PATH = (r"/[^\s\"']+", "an absolute path")
_WORD = (r"[^\s\"'$`\\]+", "one word without quotes")
_SHAPES: dict[str, tuple[str, str]] = {
    "OVERRIDES": _WORDS,
    "PREDICTION": _WORDS,
    "DATASET_URI": _S3_URI,
    "RUN_URI": _S3_URI,
    "BUNDLE_URI": _S3_URI,
    "DATA_MOUNT": _PATH,
    "DATA_ON": ("|".join(DATA_PLACES), " or ".join(DATA_PLACES)),
    "FLEET_PARAMETER": _PATH,
    "NUM_GPUS": (r"\d+", "a number"),
    "NOTICE_BUDGET_SECONDS": _SECONDS,
    "NOTICE_POLICY": ("|".join(POLICIES), " or ".join(POLICIES)),
    "LEASE_TTL_SECONDS": _SECONDS,
    "NAN_RETRIES": _COUNT,
    "NAN_SKIPS": _COUNT,
    "DATASET_WAIT_SECONDS": (r"\d+(\.\d+)?", "a number of seconds"),
}
_PARSERS = {"CHECKPOINT_INTERVAL": parse_interval, "CHECKPOINTS_KEPT": parse_kept}


def find_fault(name: str, value: str) -> str | None:
    """What is wrong with a variable's value, in one sentence; None if nothing is."""
    pattern, wanted = _SHAPES.get(name, _WORD)
    if not re.fullmatch(pattern, value):
        return f"{name} has to be {wanted}, got {value!r}"
    parse = _PARSERS.get(name)
    if parse:
        try:
            parse(value)
        except ValueError as error:
            return f"{name}: {error}"
    return None
