"""The boot step of a program: what it requires is installed, and the image's torch stays."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.source import source_sha256
from rehearsal.machines.metadata import MetadataServer, RehearsedInstance
from rehearsal.machines.process import SHIMS
from tests.userdata.rig import REPOSITORY, USERDATA, wheel
from userdata.program_environment import (
    make_empty_folders,
    make_environment,
    make_scripts_executable,
    refusal,
)

# Leaves files in the folder that it builds, as setuptools does; needs no index.
BACKEND = """
import os, sys
from pathlib import Path

def build_wheel(folder, config_settings=None, metadata_directory=None):
    import zipfile
    Path("build").mkdir(exist_ok=True)
    Path("build/built.txt").write_text(str(os.getpid()))
    name = "mine-1-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder, name), "w") as archive:
        archive.writestr("mine.py", "version = 'built'")
        about = "mine-1.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\\nName: mine\\nVersion: 1")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any")
        archive.writestr(f"{about}/RECORD", "")
    return name

build_editable = build_wheel
"""


class Machine:
    """A machine's folder with a bundle, as far as the step looks into it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bundle, self.wheels = (folder / each for each in ("m", "bundle", "wheels"))
        for path in ("etc/training", "run/training", "opt/training", "data"):
            (self.root / path).mkdir(parents=True)
        (self.bundle / "program/source").mkdir(parents=True)
        for name in ("userdata", "contract"):
            (self.bundle / name).symlink_to(REPOSITORY / name)
        self.trains("program")
        (self.root / "opt/pytorch").symlink_to(sys.prefix)
        self.wheels.mkdir()
        self.metadata = MetadataServer(instance=RehearsedInstance(id="i-0123456789abcdef0"))
        self.metadata.start()
        self.program()

    def trains(self, workload: str) -> None:
        example = (USERDATA / "run.env.example").read_text()
        text = example.replace("WORKLOAD=trajectory", f"WORKLOAD={workload}")
        (self.root / "etc/training/run.env").write_text(text)

    def program(self, **fields: object) -> None:
        record = {"command": "python train.py", **fields}
        (self.bundle / "program/program.json").write_text(json.dumps(record))

    def require(self, text: str) -> None:
        (self.bundle / "program/requirements.txt").write_text("-r source/requirements.txt\n")
        (self.bundle / "program/source/requirements.txt").write_text(text)

    def step(self) -> subprocess.CompletedProcess[str]:
        """Run the boot step where no package index is reached."""
        return subprocess.run(
            ["bash", "userdata/steps/program.sh"],
            cwd=self.bundle,
            env={
                "MACHINE_ROOT": str(self.root),
                "INSTANCE_ID": "i-0123456789abcdef0",
                "PYTHON": str(self.root / "opt/pytorch/bin/python"),
                "PATH": f"{SHIMS}:{Path(sys.executable).parent}:/usr/bin:/bin",
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.metadata.endpoint,
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(self.wheels),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def options(self) -> list[str]:
        return (self.root / "opt/training/program-options").read_text().splitlines()

    @property
    def python(self) -> str:
        return self.options[self.options.index("--interpreter") + 1]

    def says(self, program: str) -> str:
        return subprocess.check_output([self.python, "-c", program], text=True).strip()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.metadata.close()


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_the_image_is_all_that_a_program_without_requirements_gets(machine: Machine) -> None:
    done = machine.step()
    assert done.returncode == 0, done.stderr
    assert last_line(done) == "python train.py: the image has all packages that it needs"
    assert machine.options == ["--instance-type", "g5.xlarge"]
    # The root volume is full of the image.
    assert (machine.root / "opt/ml").readlink() == machine.root / "data/ml"


def test_requirements_are_installed_beside_the_images_packages_and_its_torch(
    machine: Machine,
) -> None:
    wheel(machine.wheels, "digits", "1.0")
    # Newer than the image's, which must stay as it is for the trainer.
    wheel(machine.wheels, "jmespath", "9.0")
    source = machine.bundle / "program/source"
    (source / "backend.py").write_text(BACKEND)
    (source / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    (source / "more.txt").write_text("-e .  # our own\n")
    machine.require("digits\njmespath==9.0\ntorch>=2\n-r more.txt\n")
    before = source_sha256(source)
    done = machine.step()
    assert done.returncode == 0, done.stdout + done.stderr
    # Another machine's build may differ, and would be taken for another program.
    assert source_sha256(source) == before
    folder = machine.root / "data/program-environment"
    assert machine.python == str(folder / "bin/python")
    found = machine.says(
        "import digits, jmespath, mine, importlib.util as u; "
        "print(digits.version, jmespath.version, mine.version, u.find_spec('torch').origin)"
    )
    ours = subprocess.check_output(
        [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"]
    )
    *versions, torch = found.split()
    assert versions == ["1.0", "9.0", "built"]
    assert Path(torch).resolve() == Path(ours.decode().strip()).resolve()
    # A launcher of the image starts the ranks with what the program requires.
    assert (folder / "bin/torchrun").read_text().startswith(f"#!{folder}/bin/python\n")
    # After a restart of the machine the step finds it done, without any index.
    for path in machine.wheels.iterdir():
        path.unlink()
    assert machine.step().returncode == 0


def test_the_trainer_of_a_workload_of_one_s_own_runs_with_what_it_requires(
    machine: Machine,
) -> None:
    (machine.bundle / "program/program.json").unlink()
    machine.trains("moons:MOONS")
    done = machine.step()
    assert done.returncode == 0, done.stderr
    assert last_line(done) == "moons:MOONS: the image has all packages that it needs"
    assert machine.options == [str(machine.root / "opt/pytorch/bin/python")]
    assert not (machine.root / "opt/ml").exists(), "which only a program has"
    wheel(machine.wheels, "digits", "1.0")
    machine.require("digits\n")
    assert machine.step().returncode == 0
    (python,) = machine.options
    script = (
        "import digits, importlib.util as u; print(digits.version, u.find_spec('torch') is None)"
    )
    assert subprocess.check_output([python, "-c", script], text=True).split() == ["1.0", "False"]


def test_fails_on_another_torch_whoever_asks_for_it(machine: Machine) -> None:
    wheel(machine.wheels, "torch", "1.0")
    wheel(machine.wheels, "vision", "1.0", "torch==1.0")
    for line, says in (
        ("torch==1.0", "The user requested torch==1.0"),
        ("vision", "vision 1.0 depends on torch==1.0"),
    ):
        machine.require(f"{line}\n")
        done = machine.step()
        assert done.returncode == 78
        assert "the requirements would replace torch==" in last_line(done)
        assert says in last_line(done)


def test_fails_where_no_index_is_reached_but_another_attempt_may_do_better(
    machine: Machine,
) -> None:
    machine.require("digits\n")
    done = machine.step()
    assert done.returncode == 1
    assert "No matching distribution found for digits" in done.stdout
    assert last_line(done).endswith("could not be installed; see pip's message above")


def test_another_interpreter_has_what_is_installed_and_nothing_of_the_image(
    machine: Machine,
) -> None:
    wheel(machine.wheels, "digits", "1.0")
    machine.program(interpreter=sys.executable)
    machine.require("digits\n")
    assert machine.step().returncode == 0
    assert machine.says("import digits; print(digits.version)") == "1.0"
    assert machine.says("import importlib.util as u; print(u.find_spec('torch'))") == "None"
    machine.program(interpreter="python3.99")
    done = machine.step()
    assert done.returncode == 78
    assert last_line(done).startswith("the interpreter 'python3.99' is not on this image; specify")


def test_fails_on_requirements_that_no_machine_could_install() -> None:
    versions = (
        "ERROR: Could not find a version that satisfies the requirement six==9 (from versions: "
    )
    assert str(refusal([f"{versions}1.0, 1.17.0)"])).endswith("platform is 1.17.0")
    # As without a network.
    assert refusal([f"{versions}none)"]) is None
    assert "correct the requirements file" in str(refusal(["ERROR: Invalid requirement: '!'"]))
    conflict = ["The conflict is caused by:", "    a 1 depends on b<2", "    c 1 depends on b>2"]
    reason = str(refusal([*conflict, "ERROR: ResolutionImpossible: for help visit"]))
    assert (
        reason == "the requirements contradict each other: a 1 depends on b<2; c 1 depends on b>2"
    )


NO_GCC = "error: [Errno 2] No such file or directory: 'gcc'"


@pytest.mark.parametrize(
    ("said", "is_refused"),
    [
        (NO_GCC, True),
        ("cext.c:1:10: fatal error: nofile.h: No such file or directory", True),
        ("./build_bundled.sh: line 14: cmake: command not found", True),
        ("ModuleNotFoundError: No module named 'torch'", True),
        ("Problem with the CMake installation, aborting build. CMake executable is cmake", True),
        # Another machine may have a network, or room.
        ("httpx.ConnectError: [Errno -2] Name or service not known", False),
        ("error: [Errno 28] No space left on device", False),
        ("gcc: fatal error: Killed signal terminated program cc1", False),
    ],
)
def test_fails_on_a_build_that_lacks_what_no_machine_of_the_image_has(
    said: str, is_refused: bool
) -> None:
    # As pip quotes it; a program's own words are not indented.
    lines = ["Collecting cext==1.0", "  Building wheel for cext (pyproject.toml): started"]
    reason = refusal([*lines, f"      {said}", "  ERROR: Failed building wheel for cext"])
    assert (reason is not None) == is_refused
    if is_refused:
        assert str(reason).startswith("cext has no wheel for this Python and platform, and this")
        assert f" cannot build it: {said}; require a version with a wheel" in str(reason)
    assert refusal([said]) is None


def test_a_link_of_the_image_that_leads_nowhere_is_no_script(tmp_path: Path) -> None:
    image = make_environment(tmp_path / "image", sys.executable, image=None)
    (tmp_path / "image/bin/runs").symlink_to("nowhere")
    (tmp_path / "image/bin/launcher").write_text(f"#!{image}\n")
    made = make_environment(tmp_path / "own", sys.executable, image=image)
    assert Path(made).with_name("launcher").read_text() == f"#!{made}\n"
    assert not Path(made).with_name("runs").exists()


def test_empty_folders_are_there_after_the_zip_lost_them(tmp_path: Path) -> None:
    make_empty_folders(tmp_path / "folders.json", tmp_path / "source")  # of an older bundle
    assert not (tmp_path / "source").exists()
    (tmp_path / "folders.json").write_text('[".", "out/plots"]')
    make_empty_folders(tmp_path / "folders.json", tmp_path / "source")
    assert (tmp_path / "source/out/plots").is_dir()


def test_scripts_can_be_started_after_the_zip_lost_their_modes(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "train.py").write_text("print()\n")
    make_scripts_executable(tmp_path)
    assert os.access(tmp_path / "run.sh", os.X_OK)
    assert (tmp_path / "train.py").stat().st_mode & 0o111 == 0
