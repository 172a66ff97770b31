"""Run checkov on the app's four assemblies; each of its findings must be acknowledged by reason.

Run: make checkov, which installs checkov into an environment of its own, or python -m
stacks.checkov [--json]. Exit code 1 if a finding has no reason or a reason no finding.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from stacks.checkov.findings import (
    ACKNOWLEDGED,
    FailedCheck,
    find_faults,
    read_acknowledged,
    read_report,
)

ROOT = Path(__file__).parents[2]
CHECKOV = ROOT / ".venv-checkov" / "bin" / "checkov"
OUT = ROOT / "out" / "checkov"
_PROVIDER = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
# What the app can make: its context by the assembly's name.
ASSEMBLIES: dict[str, dict[str, str]] = {
    "default": {},
    "kms": {"kms": "create", "access_logs": "true"},
    "adopted": {"dataset_bucket": "my-data", "run_bucket": "my-runs"},
    "review": {"review.repository": "me@1/mine@2", "review.oidc_provider": _PROVIDER},
}


def synthesize(name: str) -> Path:
    """Synthesize one assembly by the CDK CLI, as a deploy would; return its folder."""
    folder = OUT / name
    context = [part for pair in ASSEMBLIES[name].items() for part in ("-c", "=".join(pair))]
    command = ["npx", "--no-install", "cdk", "synth", "--quiet", "--output", str(folder), *context]
    _run(command, f"assembly {name} could not be synthesized")
    return folder


def scan(name: str, folder: Path) -> set[FailedCheck]:
    """Return checkov's findings in an assembly's templates; it asks no network for anything."""
    options = ["--framework", "cloudformation", "--quiet", "--compact", "--output", "json"]
    files = [part for path in sorted(folder.glob("*.template.json")) for part in ("-f", str(path))]
    command = [str(CHECKOV), *files, *options, "--soft-fail", "--skip-download"]
    report = json.loads(_run(command, f"checkov failed on assembly {name}"))
    return read_report(name, report)


def _run(command: Sequence[str], failure: str) -> str:
    # A token of Prisma Cloud in the environment would make checkov send the templates there.
    environment = {name: value for name, value in os.environ.items() if name != "BC_API_KEY"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{failure}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """Print findings and faults; the exit code is 1 for a fault, 2 if checkov cannot run."""
    parser = argparse.ArgumentParser(prog="python -m stacks.checkov", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print findings, reasons and faults")
    options = parser.parse_args(arguments)
    try:
        if not CHECKOV.exists():
            raise ValueError("checkov is not installed; run make checkov")
        acknowledged = read_acknowledged(ACKNOWLEDGED.read_text(encoding="utf-8"), list(ASSEMBLIES))
        found: set[FailedCheck] = set()
        for name in ASSEMBLIES:
            print(f"assembly {name}", file=sys.stderr)
            found |= scan(name, synthesize(name))
    except ValueError as mistake:
        print(f"checkov: {mistake}", file=sys.stderr)
        return 2
    faults = find_faults(found, acknowledged)
    if options.json:
        rows = [{**asdict(each), "reason": acknowledged.get(each)} for each in sorted(found)]
        print(json.dumps({"findings": rows, "faults": faults}, indent=1))
    else:
        print("\n".join(faults or [f"{len(found)} findings, each acknowledged with its reason"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
