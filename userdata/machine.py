"""Locations on this machine: paths below MACHINE_ROOT (empty on EC2) and the AWS CLI."""

import os
import shutil
import subprocess
from pathlib import Path


def machine_path(path: str) -> Path:
    """Return an absolute path of the machine; in a rehearsal it is below the machine's folder."""
    return Path(os.environ.get("MACHINE_ROOT", "") + path)


def run_aws(*words: str, timeout: float | None = None) -> bool:
    """Run the AWS CLI, from PATH or the Deep Learning AMI; return whether it succeeded.

    OSError or subprocess.TimeoutExpired if it could not run to its end.
    """
    program = shutil.which("aws") or str(machine_path("/opt/pytorch/bin/aws"))
    # The AMI's AWS CLI v1 reads the region only from this variable.
    environment = {**os.environ, "AWS_DEFAULT_REGION": os.environ["AWS_REGION"]}
    done = subprocess.run([program, *words], env=environment, timeout=timeout, check=False)
    return done.returncode == 0
