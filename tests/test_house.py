"""What must hold for the whole tree: sizes, names, pins, and a README that tells the truth."""

import ast
import os
import re
import subprocess
import tomllib
from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.house import imports_of, rooms, sources

REPOSITORY = Path(__file__).parent.parent
# Spelled in two parts, so that this file does not find itself.
HOSTS = ("py" + "pi.org", "python" + "hosted.org", "registry.npm" + "js", "deb." + "debian.org")
MAX_BYTES = 5_000_000
MAX_LINES = 600


@cache
def tracked() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (REPOSITORY / name for name in listed.stdout.splitlines())
    return tuple(path for path in paths if path.is_file())


@cache
def python_files() -> dict[Path, tuple[str | None, set[str]]]:
    """Each Python file's docstring, and the parts of what it imports."""
    trees = ((path, ast.parse(path.read_text())) for path in tracked() if path.suffix == ".py")
    return {
        path: (ast.get_docstring(tree), {*".".join(imports_of(tree)).split(".")})
        for path, tree in trees
    }


def test_no_file_is_over_five_megabytes() -> None:
    assert [path for path in tracked() if path.stat().st_size > MAX_BYTES] == []


def test_no_file_names_a_registry_host() -> None:
    named = [
        path
        for path in tracked()
        if any(host in path.read_text(errors="replace") for host in HOSTS)
    ]
    assert named == []


GROUPS = ("dev", "examples", "formats")


@pytest.mark.parametrize(
    "lock",
    [
        "requirements.txt",
        *(f"requirements-{group}.txt" for group in GROUPS),
        "stacks/checkov/requirements.txt",
    ],
)
def test_every_requirement_is_exact_and_hashed(lock: str) -> None:
    text = (REPOSITORY / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert lines
    assert [line for line in lines if "==" not in line or "--hash=sha256:" not in line] == []


def test_ci_leaves_no_test_out_for_want_of_a_package() -> None:
    """Without a group pytest skips or fails what needs it, so `make test` installs them all."""
    wanted = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["dependency-groups"]
    assert wanted.keys() == {*GROUPS}
    assert f'make setup WITH="{" ".join(GROUPS)}"' in (REPOSITORY / ".ci" / "run").read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    assert f"\nGROUPS := {' '.join(GROUPS)}\n" in makefile
    assert "\ntest: $(GROUPS:%=.venv/.%) ##" in makefile
    if "CI" in os.environ:
        assert all(version(name) for names in wanted.values() for name in names)


def test_every_python_file_opens_with_a_docstring_and_fits_in_a_reading() -> None:
    assert python_files()
    too_long = [path for path in python_files() if path.read_text().count("\n") > MAX_LINES]
    assert too_long == []
    undescribed = [path for path, (docstring, _) in python_files().items() if not docstring]
    assert undescribed == [], "open each file with one docstring"


@pytest.fixture(scope="module")
def files() -> dict[str, ast.Module]:
    return sources(REPOSITORY)


def test_no_public_class_name_stands_for_two_things(files: dict[str, ast.Module]) -> None:
    assert len(files) > 100
    found = defaultdict(list)
    for name, module in files.items():
        # Examples are independent scripts.
        for node in () if name.startswith("examples/") else module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    doubled = {name: places for name, places in found.items() if len(places) > 1}
    assert doubled == {}, "one word, one thing: give one of them an exacter name"


def test_no_file_imports_a_test_module() -> None:
    """What two test modules share stands in a module of its own, or is a fixture of a conftest."""
    modules = {path.stem for path in python_files() if path.name.startswith("test_")}
    assert modules
    importing = {
        path: found
        for path, (_, imported) in python_files().items()
        if (found := modules & imported)
    }
    assert importing == {}


def test_boot_programs_are_small_and_stop_at_the_first_error() -> None:
    scripts = [path for path in tracked() if path.suffix == ".sh"]
    assert scripts
    for path in scripts:
        assert path.read_text().count("\n") <= 80, path
        assert "set -o errexit" in path.read_text(), path


def test_the_readme_says_how_large_each_room_is(files: dict[str, ast.Module]) -> None:
    """To within a tenth, so that only a change that a reader would notice is one of this page."""
    readme = (REPOSITORY / "README.md").read_text()
    stated = re.findall(r"^\| (?:`[a-z.]+`, )*`([a-z_/]+)/` \| ([0-9,]+) \|", readme, re.MULTILINE)
    found = rooms(REPOSITORY, files)
    sizes = {str(row["room"]): int(row["code lines"]) for row in found}
    wrong = {
        room: sizes[room]
        for room, number in stated
        if abs(int(number.replace(",", "")) - sizes[room]) > sizes[room] / 10
    }
    assert len(stated) > 10
    assert wrong == {}, "python -m tests.house"


def test_the_readme_names_only_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    readme = (REPOSITORY / "README.md").read_text()
    named = set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named - targets == set()


def test_the_readme_links_only_to_files_that_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (REPOSITORY / "README.md").read_text())
    local = [link for link in links if "://" not in link]
    assert local
    assert [link for link in local if not (REPOSITORY / link).exists()] == []


def test_ci_calls_the_commands_that_people_call() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert "make test" in script
    assert "make check" in script
    assert 'part "test and bughunt" run_tests' in script
