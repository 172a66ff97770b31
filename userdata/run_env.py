"""Check run.env against contract/run_env.py: every name known, none missing, every value valid.

A refusal is one sentence that says what is wrong.
Run: python3 -m userdata.run_env FILE
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from contract.errors import Exit
from contract.run_env import NAMES, find_fault

EXAMPLE = Path(__file__).with_name("run.env.example")


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


def write_run_env(path: Path, variables: Mapping[str, str]) -> None:
    """Write NAME=value lines."""
    path.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))


def find_faults(variables: dict[str, str]) -> list[str]:
    """Return what is wrong with a run.env, one sentence per fault."""
    known = read_run_env(EXAMPLE)
    faults = [
        f"unknown variable {name}: remove it; run.env.example lists the known ones"
        for name in sorted(variables.keys() - set(NAMES))
    ]
    faults += [
        f"variable {name} is missing: user data must write it, as in {name}={known[name]}"
        for name in sorted(set(NAMES) - variables.keys())
    ]
    found = (find_fault(name, variables[name]) for name in sorted(set(NAMES) & variables.keys()))
    return faults + [fault for fault in found if fault]


def main() -> int:
    """Print the verdict on the file given as the argument."""
    path = Path(sys.argv[1])
    try:
        variables = read_run_env(path)
        faults = find_faults(variables)
    except ValueError as error:
        faults = [str(error)]
    if faults:
        print("; ".join(faults), file=sys.stderr)
        return Exit.CONFIG
    print(f"{len(variables)} variables for run {variables['RUN_ID']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
