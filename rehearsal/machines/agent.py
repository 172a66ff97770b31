#!/usr/bin/env -S python3 -I -S
"""amazon-cloudwatch-agent-ctl of a process machine: keeps the configuration, sends nothing."""

import json
import os
import sys
from pathlib import Path

KNOWN = ["-a", "fetch-config", "-m", "ec2", "-s", "-c"]


def main() -> int:
    """Accept the one call that the boot programs make."""
    arguments = sys.argv[1:]
    if arguments[:-1] != KNOWN:
        print(f"process machines support only {' '.join(KNOWN)} file:PATH", file=sys.stderr)
        return 1
    config = json.loads(Path(arguments[-1].removeprefix("file:")).read_text())
    folder = Path(os.environ["MACHINE_ROOT"]) / "opt/aws/amazon-cloudwatch-agent/etc"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "amazon-cloudwatch-agent.json").write_text(json.dumps(config, indent=1))
    print("Configuration validation succeeded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
