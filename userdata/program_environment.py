"""Make a user's own code ready to start: its scripts executable, its requirements installed.

Requirements go into a virtual environment on the data volume that also sees the image's packages;
the image's torch is kept. The file OPTIONS passes the result to run_training.sh. Exit status 78: it
would fail on any machine. Run: python3 -m userdata.program_environment
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.errors import Exit
from contract.program import EMPTY_FOLDERS, PROGRAM_FILE, SOURCE_FOLDER, Program
from userdata.machine import machine_path
from userdata.metadata import InstanceMetadata, MetadataError
from userdata.step_progress import BUILD, ENVIRONMENT

REQUIREMENTS = "program/requirements.txt"
# Read by run_training.sh: for a program, words of the trainer's command line, one per line; for a
# workload, the interpreter that the trainer runs in.
OPTIONS = "/opt/training/program-options"
# Packages that belong to torch: other versions would not work with the image's torch.
_TORCH = re.compile(r"torch|(pytorch-)?triton(-.*)?|nvidia-.*", re.IGNORECASE)
# What a build says that lacks a program, a header or a module, on this machine as on any other.
_CANNOT_BUILD = re.compile(
    r"No such file or directory(: '[^']+')?$|: (command )?not found$|exit status 127\b"
    r"|^ModuleNotFoundError: |Unknown compiler|No CMAKE_\w+_COMPILER|Problem with the CMake"
    r"|can't find Rust compiler|CUDA_HOME environment variable is not set"
)
_INSTALLED = """
import importlib.metadata, json, site, sysconfig
names = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
folders = {"own": sysconfig.get_path("purelib"), "all": site.getsitepackages()}
print(json.dumps({"packages": names, "folders": folders}))
"""


class RefusedError(ValueError):
    """A refusal that every machine would repeat; the text is one sentence."""


def make_scripts_executable(source: Path) -> None:
    """Make files that begin with #! executable: the bundle's zip does not keep their modes."""
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if file.read(2) == b"#!":
                    path.chmod(path.stat().st_mode | 0o100)


def make_empty_folders(names: Path, source: Path) -> None:
    """Make the folders of a JSON list, if there is one: the bundle's zip has files alone."""
    if names.exists():
        for name in json.loads(names.read_text(encoding="utf-8")):
            (source / name).mkdir(parents=True, exist_ok=True)


def find_interpreter(name: str) -> str:
    """Return the path of an interpreter other than the image's."""
    found = shutil.which(name)
    if found is None:
        raise RefusedError(
            f"the interpreter {name!r} is not on this image; specify the path of one that is, or "
            'none to use the image\'s with torch ("interpreter" in program.json)'
        )
    return found


def make_environment(folder: Path, python: str, *, image: str | None) -> str:
    """Make a virtual environment of `python` that sees `image`'s packages; return its python."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    made = str(folder / "bin/python")
    if image is not None:
        own = Path(_installed(made)["folders"]["own"])
        seen = _installed(image)["folders"]["all"]
        # addsitedir also reads their .pth files; they come after this environment's packages.
        lines = (f"import site; site.addsitedir({each!r})\n" for each in seen)
        (own / "image.pth").write_text("".join(lines))
        _take_over_scripts(Path(image).parent, folder / "bin")
    return made


def _take_over_scripts(image: Path, own: Path) -> None:
    """Copy the image's scripts, such as torchrun, and make them start this environment's python."""
    interpreters = tuple(f"#!{folder}/python".encode() for folder in (image, image.resolve()))
    for path in image.iterdir():
        # A link may lead nowhere.
        if not path.is_file() or (own / path.name).exists():
            continue
        with path.open("rb") as file:
            if not file.read(1024).startswith(interpreters):
                continue
        _, _, rest = path.read_bytes().partition(b"\n")
        (own / path.name).write_bytes(f"#!{own}/python\n".encode() + rest)
        (own / path.name).chmod(0o755)


def _installed(python: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run([python, "-c", _INSTALLED], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def install(
    python: str, pip: str, constraints: Path, environment: Mapping[str, str], build: Path
) -> None:
    """Install the requirements into `python`'s environment, with the pip of the image."""
    program = build / Path(REQUIREMENTS).parent
    shutil.copytree(Path(REQUIREMENTS).parent, program, dirs_exist_ok=True)
    command = [pip, "-m", "pip", "--python", python, "install", "--no-input"]
    command += ["--no-cache-dir", "--progress-bar", "off", "--constraint", str(constraints)]
    process = subprocess.Popen(
        [*command, "--requirement", str(build / REQUIREMENTS)],
        # A path in the requirements is relative to the program's own folder.
        cwd=build / SOURCE_FOLDER,
        env={**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        if not line.startswith("Requirement already satisfied"):
            print(line.rstrip(), flush=True)
        lines.append(line.rstrip())
    if process.wait() != 0:
        raise refusal(lines) or OSError(
            "the packages that the program requires could not be installed; see pip's message above"
        )


def refusal(lines: Sequence[str]) -> RefusedError | None:
    """Return why no machine could install this, from pip's output; None if another might."""
    if any("ResolutionImpossible" in line for line in lines):
        # "The conflict is caused by:", followed by indented lines, one per version wanted.
        wanted = [line.strip() for line in lines if line.startswith("    ")]
        ours = [line for line in wanted if "(constraint)" in line]
        theirs = "; ".join(line for line in wanted if "(constraint)" not in line)
        if ours:
            kept = ", ".join(line.rpartition(" ")[2] for line in ours)
            return RefusedError(
                f"the requirements would replace {kept} of the image: {theirs}; require a version "
                "that fits, or remove the line"
            )
        return RefusedError(f"the requirements contradict each other: {theirs}")
    for line in lines:
        if re.match(r"ERROR: (Invalid requirement|Could not open requirements file)", line):
            return RefusedError(line.removeprefix("ERROR: ") + "; correct the requirements file")
        found = re.search(r"satisfies the requirement (.+) \(from versions: (.+)\)", line)
        # "none" may also mean that there is no network.
        if found and found[2] != "none":
            newest = found[2].rpartition(", ")[2]
            return RefusedError(
                f"the requirements ask for {found[1]}, but the newest version for this Python and "
                f"platform is {newest}"
            )
    return _unbuildable(lines)


def _unbuildable(lines: Sequence[str]) -> RefusedError | None:
    """Return which package has no wheel and cannot be built here, and why; None if another is."""
    package = ""
    for line in lines:
        if found := re.match(r" *(Collecting|Processing|Building wheel for) (\S+)", line):
            package = found[2].rpartition("/")[2]
        # pip indents what a build has said.
        elif line.startswith("      ") and _CANNOT_BUILD.search(said := line.strip()):
            return RefusedError(
                f"{package} has no wheel for this Python and platform, and this image cannot build "
                f"it: {said}; require a version with a wheel, or put a wheel into your folder"
            )
    return None


def prepare(program: Program | None, image: str, data_volume: Path) -> str | None:
    """Return the interpreter that the program or workload needs; None: the image's, unchanged."""
    interpreter = program.interpreter if program else ""
    python = find_interpreter(interpreter) if interpreter else image
    own = python if interpreter else None
    if not Path(REQUIREMENTS).exists():
        return own
    folder = data_volume / ENVIRONMENT
    is_above_image = not interpreter
    made = make_environment(folder, python, image=image if is_above_image else None)
    packages = _installed(image)["packages"] if is_above_image else {}
    kept = {name: version for name, version in packages.items() if _TORCH.fullmatch(name)}
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()))
    scratch = data_volume / "scratch"
    scratch.mkdir(exist_ok=True)
    variables = program.environment if program else {}
    pip = {name: text for name, text in variables.items() if name.startswith("PIP_")}
    environment = {**os.environ, "TMPDIR": str(scratch), **pip}
    install(made, image, constraints, environment, data_volume / BUILD)
    # A file or an address can install another build of the image's version.
    if is_above_image and Path(_installed(made)["folders"]["own"], "torch").exists():
        raise RefusedError(
            f"the requirements would replace torch=={packages['torch']} of the image; remove the "
            "line that names the file or address of another build"
        )
    return made


def main() -> int:
    """Prepare this bundle's program or workload; the last line says what was done or why not."""
    data_volume, spec = machine_path(os.environ["DATA_MOUNT"]), Path(PROGRAM_FILE)
    program = Program.from_json(spec.read_text(encoding="utf-8")) if spec.exists() else None
    make_scripts_executable(Path(SOURCE_FOLDER))
    make_empty_folders(Path(EMPTY_FOLDERS), Path(SOURCE_FOLDER))
    try:
        python = prepare(program, os.environ["PYTHON"], data_volume)
        instance_type = InstanceMetadata().read("meta-data/instance-type") or "unknown"
    except RefusedError as refused:
        print(refused)
        return Exit.CONFIG
    except (OSError, MetadataError) as error:
        print(error)
        return 1
    if program is None:
        options = [python or os.environ["PYTHON"]]
    else:
        options = ["--instance-type", instance_type]
        options += [] if python is None else ["--interpreter", python]
    machine_path(OPTIONS).write_text("".join(f"{word}\n" for word in options))
    has = f"python is {python}" if python else "the image has all packages that it needs"
    print(f"{program.command if program else os.environ['WORKLOAD']}: {has}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
