"""Power-offs in the middle of a boot, at worst moments: what the next boot finds and does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stacks.parameters import StackParameters
from stacks.user_data import render
from tests.stacks.templates import sample_run_env
from tests.userdata.rig import install, wait_until

ENABLED = "etc/systemd/system/multi-user.target.wants/training-boot.service"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's folder, in which names with spaces must not matter."""
    folder = tmp_path / "a machine"
    for name in ("var/lib/cloud/data", "bin"):
        (folder / name).mkdir(parents=True)
    (folder / "var/lib/cloud/data/instance-id").write_text("i-1\n")
    return folder


def environment_of(root: Path) -> dict[str, str]:
    path = f"{root / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return {"MACHINE_ROOT": str(root), "PATH": path}


def test_user_data_that_a_power_off_ended_runs_again_until_the_boot_is_enabled(root: Path) -> None:
    calls = root / "calls"
    install(root / "bin/aws", f'#!/bin/sh\necho "$@" >>"{calls}"\nexec sleep 1000\n')
    script = render(sample_run_env(StackParameters.for_size("g5.xlarge")))
    user_data = install(root / "var/lib/cloud/instance/scripts/part-001", script)

    def starts_fetching(program: Path) -> bool:
        """Run a program until it asks for the bundle, and power off; return whether it does."""
        calls.write_text("")
        process = subprocess.Popen([program], env=environment_of(root), process_group=0)
        wait_until(lambda: process.poll() is not None or calls.read_text() != "", 30)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "ssm get-parameter" in calls.read_text()

    assert starts_fetching(user_data)
    (again,) = (root / "var/lib/cloud/scripts/per-boot").iterdir()
    assert starts_fetching(again)
    assert starts_fetching(again), "a boot that was cut off twice"
    install(root / ENABLED, "")
    assert not starts_fetching(again), "it would replace the bundle of a machine that trains"
