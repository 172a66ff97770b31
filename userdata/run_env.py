"""Check run.env against run.env.example: every name known, none missing, every value possible.

Refuses with one sentence that names what is wrong. Run: python3 -m userdata.run_env FILE
"""

import re
import sys
from pathlib import Path

EXAMPLE = Path(__file__).with_name("run.env.example")
S3_URI = (r"s3://[^/\s]+/\S+", "s3://bucket/key")
SECONDS = (r"0*[1-9]\d*(\.\d+)?|0\.\d*[1-9]\d*", "a number of seconds above 0")
WORDS = (r'"[^"$`\\]*"', '"a=b c=d" in double quotes')
PATH = (r"/[^\s\"']+", "an absolute path")
WORD = (r"[^\s\"'$`\\]+", "one word without quotes")
SHAPES = {
    "OVERRIDES": WORDS,
    "PREDICTION": WORDS,
    "DATASET_URI": S3_URI,
    "RUN_URI": S3_URI,
    "BUNDLE_URI": S3_URI,
    "DATA_MOUNT": PATH,
    "FLEET_PARAMETER": PATH,
    "CHECKPOINT_INTERVAL": (r"auto|[1-9]\d*(epochs?|steps?|s)", "like auto, 2epochs or 600s"),
    "CHECKPOINTS_KEPT": (r"[1-9]\d*(,[1-9]\d*(epochs?|steps?))?", "like 3 or 3,10epochs"),
    "NOTICE_BUDGET_SECONDS": SECONDS,
    "NOTICE_POLICY": (r"train-on|stop", "train-on or stop"),
    "LEASE_TTL_SECONDS": SECONDS,
    "DATASET_WAIT_SECONDS": (r"\d+(\.\d+)?", "a number of seconds"),
}


def read_run_env(path: Path) -> dict[str, str]:
    """Read NAME=value lines as they stand, quotes included; ValueError for anything else."""
    variables: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator or not name.isidentifier():
            raise ValueError(f"line {number} of {path} is not NAME=value: {line!r}")
        variables[name] = value
    return variables


def find_faults(variables: dict[str, str]) -> list[str]:
    """Say what is wrong with a run.env, one sentence a fault; an empty list means nothing is."""
    known = read_run_env(EXAMPLE)
    faults = [
        f"unknown variable {name}: take it out, run.env.example lists those that exist"
        for name in sorted(variables.keys() - known.keys())
    ]
    faults += [
        f"variable {name} is missing: user data has to write it, as in {name}={known[name]}"
        for name in sorted(known.keys() - variables.keys())
    ]
    for name in sorted(known.keys() & variables.keys()):
        pattern, wanted = SHAPES.get(name, WORD)
        if not re.fullmatch(pattern, variables[name]):
            faults.append(f"{name} has to be {wanted}, got {variables[name]!r}")
    return faults


def main() -> int:
    """Print the verdict on the file given as the argument."""
    path = Path(sys.argv[1])
    try:
        variables = read_run_env(path)
        faults = find_faults(variables)
    except (OSError, ValueError) as error:
        faults = [str(error)]
    if faults:
        print("; ".join(faults), file=sys.stderr)
        return 1
    print(f"{len(variables)} variables for run {variables['RUN_ID']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
