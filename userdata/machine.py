"""This machine: paths below MACHINE_ROOT (empty on EC2), the AWS CLI, the stop of a service."""

import os
import shutil
import signal
import subprocess
import sys
import threading
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


def send(what: str, *words: str, timeout: float) -> bool:
    """Return whether the AWS CLI succeeded; if it could not run to its end, print why."""
    try:
        return run_aws(*words, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{what}: {error}", file=sys.stderr, flush=True)
        return False


def stop_event() -> threading.Event:
    """Return an event that SIGTERM sets, with which systemd stops a service."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop
