"""Locations on this machine: paths below MACHINE_ROOT (empty on EC2) and the AWS CLI."""

import os
import shutil
from pathlib import Path


def machine_path(path: str) -> Path:
    """Return an absolute path of the machine; in a rehearsal it is below the machine's folder."""
    return Path(os.environ.get("MACHINE_ROOT", "") + path)


def aws_cli() -> str:
    """Return the AWS CLI: from PATH, else from the Deep Learning AMI's environment."""
    return shutil.which("aws") or str(machine_path("/opt/pytorch/bin/aws"))
