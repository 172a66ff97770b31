"""Power-offs in the middle of a boot, at worst moments: what the next boot finds and does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from rehearsal.machines.services import load_units
from stacks.parameters import StackParameters
from stacks.user_data import render
from tests.stacks.templates import sample_run_env
from tests.userdata.rig import REPOSITORY, USERDATA, install, wait_until

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


# `aws s3 cp --only-show-errors FROM TO`, from files.
AWS = """#!/bin/bash
from=$MACHINE_ROOT/s3/${4#s3://}
[[ -e $from ]] || { echo >&2 "An error occurred (404)"; exit 1; }
exec /bin/cp "$from" "$5"
"""
# The power goes off at one of the commands that touch a bundle or run.env, which is torn then.
CUT = """#!/bin/bash
target=${!#}
if [[ -n ${CUT_AT:-} && $* == *@(bundle|run.env)* ]]; then
    echo "${0##*/} $*" >>"$MACHINE_ROOT/touched"
    if (($(wc -l <"$MACHINE_ROOT/touched") == CUT_AT)); then
        [[ $target != */etc/training/run.env ]] || echo "RUN_ID=torn" >"$target"
        kill -KILL 0
    fi
fi
exec "/bin/${0##*/}" "$@"
"""
OLDER = 'echo "older code, $(grep ^BUNDLE_URI= "$MACHINE_ROOT/etc/training/run.env")" >booted\n'


def lay_bundles(root: Path) -> str:
    """Lay a machine that has booted a newer bundle than its run's; return that one's URI."""
    for name in ("mv", "rm", "cp"):
        install(root / "bin" / name, CUT)
    install(root / "bin/aws", AWS)
    bundle = root / "opt/training/bundle"
    for name in ("userdata", "contract"):
        shutil.copytree(REPOSITORY / name, bundle / name)
    (bundle / "userdata/steps/interpreter.sh").write_text("echo newer code; exit 78\n")
    variables = (USERDATA / "run.env.example").read_text().splitlines()
    (run_uri,) = [line.partition("=")[2] for line in variables if line.startswith("RUN_URI=")]
    (root / "etc/training").mkdir(parents=True)
    (root / "etc/training/run.env").write_text("\n".join(variables) + "\n")
    first = f"{run_uri}/bundles/older.zip"
    run = root / "s3" / run_uri.removeprefix("s3://")
    (run / "bundles").mkdir(parents=True)
    (run / "head.json").write_text(json.dumps({"state": "released"}))
    (run / "config.json").write_text(json.dumps({"bundle_uri": first}))
    with zipfile.ZipFile(run / "bundles/older.zip", "w") as archive:
        archive.writestr("userdata/bootstrap.sh", OLDER)
        for path in (USERDATA / "run.env.example", *(REPOSITORY / "contract").glob("*.py")):
            archive.write(path, path.relative_to(REPOSITORY))
    return first


def boot(root: Path, **more: str) -> None:
    """Start the unit that is enabled, and whatever it starts, until it ends."""
    shutil.rmtree(root / "run", ignore_errors=True)
    nobody = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1", "STEP_RETRY_SECONDS": "0"}
    process = subprocess.Popen(
        load_units(USERDATA / "units")["training-boot.service"].exec_start,
        cwd=root / "opt/training",
        env={**environment_of(root), **nobody, **more},
        process_group=0,
    )
    process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow  # weekly; in each run of the tests: a swap that fails
def test_a_power_off_in_the_swap_of_bundles_leaves_the_run_its_first_one(root: Path) -> None:
    pristine = root.with_name("pristine")
    first = lay_bundles(root)
    shutil.copytree(root, pristine)
    found, touched, cut_at = dict[str, str](), "", 0
    while len(touched.splitlines()) == cut_at:
        cut_at += 1
        shutil.rmtree(root)
        shutil.copytree(pristine, root)
        boot(root, CUT_AT=str(cut_at))
        touched = (root / "touched").read_text()
        boot(root)
        booted = root / "opt/training/booted"
        found[f"{cut_at} {touched.splitlines()[-1]}"] = (
            booted.read_text().strip() if booted.exists() else "none"
        )
    assert cut_at > 4
    assert found == dict.fromkeys(found, f"older code, BUNDLE_URI={first}")


def test_a_swap_that_fails_leaves_the_bundle_that_reports_it(root: Path) -> None:
    lay_bundles(root)
    install(root / "bin/sync", "#!/bin/sh\n[ ! -e bundle.next ]\n")
    boot(root)
    assert (root / "opt/training/bundle/userdata/service_failed.sh").exists()
    assert not (root / "opt/training/booted").exists()
