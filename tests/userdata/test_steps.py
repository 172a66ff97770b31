"""Single boot steps that fail before they need anything of a booted machine."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.errors import Exit
from rehearsal.machines.process import EC2_DISKS, SHIMS, JsonDisk
from rehearsal.machines.services import parse_environment_file
from tests.userdata.rig import REPOSITORY, USERDATA, install, lay_disks, wheel

INSTANCE = "i-0123456789abcdef0"
STRANGE = JsonDisk(name="nvme0n1", serial="vol1", device_name="sdf", signatures=("LVM2_member",))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's folder as far as a step looks into it."""
    for name in ("etc/training", "run/training", "opt/training", "sys/disks", "bin"):
        (tmp_path / name).mkdir(parents=True)
    example = (USERDATA / "run.env.example").read_text()
    (tmp_path / "etc/training/run.env").write_text(example)
    lay_disks(tmp_path, STRANGE, EC2_DISKS[1])
    return tmp_path


def train_detection(root: Path) -> None:
    run_env = root / "etc/training/run.env"
    run_env.write_text(run_env.read_text().replace("WORKLOAD=trajectory", "WORKLOAD=detection"))


def mount_volume(root: Path) -> None:
    """Mount the machine's EBS volume as a step before has done."""
    lay_disks(root, replace(STRANGE, mounted="/data", tags={"TYPE": "xfs", "UUID": "8f5b-1"}))


def run_step(root: Path, name: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return run_script(root, f"userdata/steps/{name}.sh", **settings)


def run_script(
    root: Path, name: str, *, bundle: Path = REPOSITORY, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = f"{root / 'bin'}:{SHIMS}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", name],
        cwd=bundle,
        env={"MACHINE_ROOT": str(root), "INSTANCE_ID": INSTANCE, "PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_fails_on_a_volume_with_something_unknown_on_it_and_leaves_it_alone(root: Path) -> None:
    done = run_step(root, "data_volume")
    assert done.returncode == 1
    assert "/dev/nvme0n1 contains something other than a file system" in done.stderr
    assert "left untouched: nvme0n1 0x0 LVM2_member" in done.stderr
    assert "times_formatted" not in (root / "sys/disks/nvme0n1.json").read_text()


def test_fails_when_no_interpreter_has_torch_and_names_the_remedy(root: Path) -> None:
    # -S: a Python without its installed packages, as on a base AMI.
    install(root / "bin/python3", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    done = run_step(root, "interpreter")
    # No other machine with this image could do better.
    assert done.returncode == Exit.CONFIG
    assert "no interpreter has torch" in done.stderr
    assert "use a Deep Learning AMI with PyTorch" in done.stderr
    assert not (root / "opt/training/machine.env").exists()


def image_without(root: Path, *lacking: str, pip: str) -> Path:
    """Make the image's interpreter: it lacks some packages, and runs `pip` for -m."""
    (root / "lacks.py").write_text(
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        f"lacking = {lacking!r}\n"
        "importlib.util.find_spec = lambda name: None if name in lacking else find(name)\n"
        "exec(sys.argv.pop(1))\n"
    )
    return install(
        root / "opt/pytorch/bin/python",
        "#!/bin/bash\n"
        f"[[ $1 == -m ]] && {{ {pip}; exit; }}\n"
        f'[[ $1 == -c ]] && exec "{sys.executable}" "{root}/lacks.py" "${{@:2}}"\n',
    )


def test_an_interpreter_in_a_folder_with_a_space_is_found_by_scripts_and_services(
    root: Path,
) -> None:
    """As in a rehearsal below such a checkout."""
    spaced = root.rename(root.with_name("a folder"))
    python = image_without(spaced, pip="exit 1")
    assert run_step(spaced, "interpreter").returncode == 0
    kept = spaced / "opt/training/machine.env"
    read = 'source "$1"; printf %s "$PYTHON"'
    assert subprocess.check_output(["bash", "-c", read, "", kept], text=True) == str(python)
    # As systemd does it, and the services of a rehearsal.
    assert parse_environment_file(kept.read_text())["PYTHON"] == str(python)


@pytest.mark.parametrize(
    "lacking", [(), ("numpy",), ("safetensors",), ("boto3", "numpy"), ("xxhash",)]
)
def test_boot_installs_what_the_image_lacks_and_nothing_else(
    root: Path, lacking: tuple[str, ...]
) -> None:
    # No wheel fits: each is asked of the index next.
    pip = f'echo "$*" >>{root}/installed; [[ $* != *--no-index* ]]'
    python = image_without(root, *lacking, pip=pip)
    done = run_step(root, "interpreter")
    assert done.returncode == 0, done.stderr
    assert f"PYTHON={python}\n" in (root / "opt/training/machine.env").read_text()
    calls = root / "installed"
    installed = calls.read_text().splitlines() if calls.exists() else []
    wanted = [
        *(["userdata/requirements.txt"] if {"boto3", "safetensors"} & {*lacking} else []),
        *(["userdata/requirements-numpy.txt"] if "numpy" in lacking else []),
        *(["userdata/requirements-xxhash.txt"] if "xxhash" in lacking else []),
    ]
    from_index = [line.split()[-1] for line in installed if "--no-index" not in line]
    assert from_index == wanted
    from_wheels = [line for line in installed if line.endswith("--find-links userdata/wheels")]
    assert len(from_wheels) == len(wanted)
    only = f"--require-hashes --no-deps --upgrade --target {root}/"
    assert all(only in line for line in installed)


@pytest.mark.parametrize("lacking", [(), ("scipy",), ("scipy", "faster_coco_eval")])
def test_boot_installs_what_the_workload_alone_needs_and_leaves_numpy_alone(
    root: Path, lacking: tuple[str, ...]
) -> None:
    python = image_without(root, *lacking, pip=f'echo "$*" >>{root}/installed')
    (root / "installed").touch()
    assert run_step(root, "interpreter").returncode == 0, "another workload needs none of them"
    assert (root / "installed").read_text() == ""
    train_detection(root)
    assert run_step(root, "interpreter").returncode == 0
    assert python.exists()
    words = [line.split() for line in (root / "installed").read_text().splitlines()]
    files = sorted(line[line.index("--requirement") + 1] for line in words)
    assert files == sorted(f"userdata/requirements-detection/{name}.txt" for name in lacking)


def test_fails_where_neither_bundle_nor_index_has_what_the_workload_needs(root: Path) -> None:
    image_without(root, "scipy", pip="exit 1")
    train_detection(root)
    done = run_step(root, "interpreter")
    assert done.returncode == 1, "the index may be back at the next attempt"
    assert "requirements-detection/scipy.txt could not be installed, and the image" in done.stdout
    assert "deploy after `make setup`" in done.stdout


def test_an_image_that_gets_no_xxhash_has_sha_256(root: Path) -> None:
    image_without(root, "xxhash", pip="exit 1")
    done = run_step(root, "interpreter")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checksums are SHA-256 on this machine") == 1


def test_the_bundles_wheels_are_installed_while_the_index_is_down(
    root: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    for name in ("userdata", "contract"):
        shutil.copytree(REPOSITORY / name, bundle / name)
    (bundle / "userdata/wheels").mkdir()
    made = wheel(bundle / "userdata/wheels", "boto3", "1.0")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    pins = bundle / "userdata/requirements.txt"
    pins.write_text(f"boto3==1.0 --hash=sha256:{digest}\n")
    image_without(root, "boto3", pip=f'"{sys.executable}" "$@"')
    no_index = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "0"}
    done = run_step(root, "interpreter", bundle=bundle, **no_index)
    assert done.returncode == 0, done.stderr
    assert (root / "opt/training/packages/boto3.py").exists()
    # Bytes that are not the pinned ones are never installed.
    pins.write_text(f"boto3==1.0 --hash=sha256:{'0' * 64}\n")
    done = run_step(root, "interpreter", bundle=bundle, **no_index)
    assert done.returncode == 1
    assert "the bundle has no wheels that fit" in done.stdout


def test_fails_on_a_python_that_is_too_old(root: Path) -> None:
    is_old = '[[ $2 == *version_info* ]] && exit 1; [[ $1 == --version ]] && echo "Python 3.10.12"'
    install(root / "opt/pytorch/bin/python", f"#!/bin/bash\n{is_old}; exit 0\n")
    done = run_step(root, "interpreter")
    assert done.returncode == Exit.CONFIG
    assert "Python 3.10.12 of this image is too old: training needs 3.11" in done.stderr


@pytest.mark.parametrize(
    ("log", "starts"), [("", True), ("the first attempt's last words\n", False)]
)
def test_the_trainer_starts_again_only_where_all_gpus_are_left(
    root: Path, log: str, starts: bool
) -> None:
    lost = "echo '0 NVIDIA GPUs are on the PCI bus, but the size has 1'; exit 1"
    program = f'#!/bin/bash\n[[ $1 == *import_torch.py ]] && {{ {lost}; }}\necho "$*"\n'
    python = install(root / "bin/python", program)
    (root / "var/log/training").mkdir(parents=True)
    (root / "var/log/training/training.log").write_text(log)
    mount_volume(root)
    done = run_script(root, "userdata/run_training.sh", PYTHON=str(python))
    assert done.returncode == (0 if starts else Exit.MACHINE)
    assert ("-m training run" in done.stdout) == starts
    assert ("0 NVIDIA GPUs are on the PCI bus" in done.stdout) != starts


def test_the_trainer_never_starts_where_a_gpu_waits_for_its_reset(root: Path) -> None:
    install(root / "bin/nvidia-smi", "#!/bin/bash\necho '00000000:00:1E.0, 1, 0'\n")
    mount_volume(root)
    assert run_script(root, "userdata/run_training.sh", PYTHON="/bin/echo").returncode == (
        Exit.MACHINE
    )


def test_a_signal_while_the_gpus_are_checked_does_not_end_the_start(root: Path) -> None:
    signal = "read -r _ _ _ bash _ </proc/$PPID/stat; kill -USR1 $bash; kill -USR2 $bash"
    install(root / "bin/nvidia-smi", f"#!/bin/bash\n{signal}\n")
    mount_volume(root)
    done = run_script(root, "userdata/run_training.sh", PYTHON="/bin/echo")
    assert (done.returncode, done.stdout[:16]) == (0, "-m training run ")


def test_the_trainer_imports_a_workload_of_one_s_own_from_the_bundle(
    root: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    for name in ("userdata", "contract"):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).symlink_to(REPOSITORY / name)
    (bundle / "program/source").mkdir(parents=True)
    python = install(root / "bin/made", '#!/bin/bash\necho "$*"\nenv\n')
    (root / "opt/training").mkdir(parents=True, exist_ok=True)
    (root / "opt/training/program-options").write_text(f"{python}\n")
    mount_volume(root)
    done = run_script(root, "userdata/run_training.sh", bundle=bundle, PYTHON="/bin/false")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("-m training run --workload trajectory --recipe full ")
    assert " --source program/source --override " in done.stdout
    assert "AWS_REGION=" in done.stdout
    # The retries of our own calls of the AWS CLI are not those of the user's clients.
    assert not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & set(re.findall(r"(?m)^\w+", done.stdout))


def test_what_a_program_stages_is_on_the_data_volume_and_gone_at_the_next_attempt(
    root: Path,
) -> None:
    """Lightning's checkpoints, through fsspec, filled the root volume, or took two writes."""
    run_env = root / "etc/training/run.env"
    run_env.write_text(run_env.read_text().replace("WORKLOAD=trajectory", "WORKLOAD=program"))
    (root / "opt/training/program-options").touch()
    mount_volume(root)
    code = "import tempfile; print(tempfile.gettempdir())"
    python = install(root / "bin/made", f'#!/bin/bash\n{sys.executable} -c "{code}"\nenv\n')
    staged = root / "data/scratch/tmp"
    for name in ("tmpq1w2e3r4", "torchinductor_root/code"):
        (staged / name).mkdir(parents=True)
    done = run_script(root, "userdata/run_training.sh", PYTHON=str(python))
    assert done.stdout.splitlines()[0] == str(staged), done.stderr
    assert f"XDG_DATA_HOME={root}/data/scratch/share\n" in done.stdout
    assert [path.name for path in staged.iterdir()] == ["torchinductor_root"]
    own = root / "own"
    done = run_script(root, "userdata/run_training.sh", PYTHON=str(python), TMPDIR=str(own))
    assert done.stdout.splitlines()[0] == str(own)


def test_the_trainer_never_starts_on_the_root_volume_where_the_data_volume_was_lost(
    root: Path,
) -> None:
    # As systemd leaves a volume that was detached: unmounted, its mount point a plain folder.
    (root / "data").mkdir()
    done = run_script(root, "userdata/run_training.sh", PYTHON="/bin/echo")
    # Not 2: the trainer would take the missing dataset for the user's mistake and end the run.
    assert done.returncode == Exit.MACHINE
    assert done.stdout == "the data volume is no longer mounted at /data\n"
    assert list((root / "data").iterdir()) == []


def test_metrics_carry_the_stack_and_never_only_the_instance(root: Path) -> None:
    done = run_step(root, "cloudwatch_agent")
    assert done.stdout.endswith("CloudWatch agent started for stack SpotTraining-TrainingStack\n")
    config = json.loads(
        (root / "opt/aws/amazon-cloudwatch-agent/etc/amazon-cloudwatch-agent.json").read_text()
    )
    collected = config["metrics"]["metrics_collected"]
    assert {"nvidia_gpu", "mem", "disk"} <= collected.keys()
    for plugin in ("nvidia_gpu", "mem", "disk"):
        assert collected[plugin]["append_dimensions"] == {"Stack": "SpotTraining-TrainingStack"}
    # Its EBS receiver takes no dimension: it is summed up over the namespace, the stack's own.
    assert config["metrics"]["namespace"] == "Training/SpotTraining-TrainingStack"
    assert config["metrics"]["aggregation_dimensions"] == [["Stack"], []]
    assert collected["disk"]["resources"] == ["/", "/data"]


def test_a_head_that_cannot_be_read_is_no_failure_of_the_trainer(root: Path) -> None:
    done = run_script(
        root,
        "userdata/after_training.sh",
        AWS_ENDPOINT_URL="http://127.0.0.1:1",
        AWS_ACCESS_KEY_ID="none",
        AWS_SECRET_ACCESS_KEY="none",
        AWS_MAX_ATTEMPTS="1",
        EXIT_STATUS="75",
    )
    assert done.returncode == 0
    assert "the head could not be read; the Guard will stop the fleet if needed" in done.stdout


def test_without_metadata_or_list_nothing_is_read_ahead_and_nothing_fails(root: Path) -> None:
    nobody = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}
    done = run_step(root, "read_ahead", **nobody)
    assert (done.returncode, done.stderr) == (0, "")
    printed = "     read-ahead: what an earlier machine has read is unknown: userdata.metadata.Meta"
    assert done.stdout.startswith(printed)
    (event,) = (root / "var/lib/training/events").iterdir()
    assert json.loads(event.read_text())["name"] == "boot-read-ahead"


@pytest.mark.parametrize(
    ("text", "boots"),
    [
        ("PYTHON=python3\nINSTANCE_ID=i-12\n", False),
        ("PYTHON=python3\nINSTANCE_ID=i-1\n", True),
        ("", True),  # a power-off came before it was on the disk
    ],
)
def test_the_boot_of_the_machine_that_an_image_was_made_of_is_not_repeated(
    tmp_path: Path, text: str, boots: bool
) -> None:
    files = {"var/lib/cloud/data/instance-id": "i-1", "opt/training/machine.env": text}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content)
    done = subprocess.run(
        ["bash", USERDATA / "bootstrap.sh"],
        env={**os.environ, "MACHINE_ROOT": f"{tmp_path}"},
        capture_output=True,
        text=True,
    )
    # It has no run.env here.
    assert (done.returncode == 0, bool(done.stdout)) == (not boots, boots)
    assert (tmp_path / "var/lib/training").exists() == boots


SMI = """#!/bin/sh
echo "$@" >>{root}/asked
case $1 in
--query-supported-clocks=memory,graphics) printf '405, 405\\n6251, 990\\n6251, 1710\\n' ;;
--applications-clocks=*) {answer} ;;
esac
"""


@pytest.mark.parametrize(
    ("answer", "printed"),
    [
        (
            "echo 'Applications clocks set to \"(MEM 6251, SM 1710)\" for GPU 0'",
            "GPU clocks set to the highest supported: 6251,1710 MHz",
        ),
        (
            "echo 'Setting applications clocks is not supported for GPU 0.'",
            "GPU clocks left as they are: Setting applications clocks is not supported for GPU 0.",
        ),
        (
            "echo 'Setting applications clocks is not supported for GPU 0'; exit 3",
            "GPU clocks left as they are: Setting applications clocks is not supported for GPU 0",
        ),
    ],
)
def test_services_set_the_highest_clocks_and_boot_goes_on_where_a_driver_refuses(
    root: Path, answer: str, printed: str
) -> None:
    install(root / "bin/nvidia-smi", SMI.format(root=root, answer=answer))
    install(root / "bin/systemctl", "#!/bin/sh\n")
    done = run_step(root, "services")
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    asked = (root / "asked").read_text().splitlines()
    assert asked[1:] == ["--persistence-mode=1", "--applications-clocks=6251,1710"]


def test_services_say_nothing_of_clocks_where_there_is_no_gpu(root: Path) -> None:
    install(root / "bin/systemctl", "#!/bin/sh\n")
    done = run_step(root, "services")
    assert done.returncode == 0, done.stderr
    assert "clocks" not in done.stdout
