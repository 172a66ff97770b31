"""Where things are on this machine: paths below MACHINE_ROOT (empty on EC2) and the AWS CLI."""

import os
import shutil
from pathlib import Path


def machine_path(path: str) -> Path:
    """The absolute path `path` of this machine; a process machine keeps it in its own folder."""
    return Path(os.environ.get("MACHINE_ROOT", "") + path)


def aws_cli() -> str:
    """The AWS CLI: from PATH, else from the environment that the Deep Learning AMI brings."""
    return shutil.which("aws") or str(machine_path("/opt/pytorch/bin/aws"))
