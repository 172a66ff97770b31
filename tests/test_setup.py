"""How commands find their environment: in any checkout, also in a folder with a space, or none."""

import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# Each package with commands, and a command that needs something from outside the standard library.
COMMANDS = (
    "training run --workload growth --recipe laptop --run-uri x --dataset-uri x",
    "training data import . --workload growth --out x",
    "sizing catalogue",
    "operate list",
    "rehearsal drill --list",
    "review main",
    "benchmarks kill_table",
    "benchmarks.gpu steps --seconds 1",
    "stacks.doctor",
    "stacks.parameters",
    "stacks.sagemaker submit",
    "stacks.data_key",
    "training.workloads.detection.published",
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin/python"


def run(*words: str | Path, folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_fails_outside_the_environment_with_one_sentence_that_says_what_to_type(
    bare: Path, command: str
) -> None:
    done = run(bare, "-m", *command.split())
    assert done.returncode != 0
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: No module named '")
    activate = f"source {shlex.quote(str(REPOSITORY / '.venv/bin/activate'))}"
    assert str(bare) in said and "run `make setup` once in " in said and activate in said


def test_a_missing_package_inside_the_environment_keeps_its_traceback(tmp_path: Path) -> None:
    """It is a mistake in somebody's code, for which no other environment helps."""
    (tmp_path / "mine.py").write_text("import training\nimport not_there\n")
    code = "import runpy, sys; sys.path[:0] = sys.argv[1:]; sys.argv = ['-m']; "
    code += "runpy.run_module('mine', run_name='__main__')"
    done = run(sys.executable, "-c", code, tmp_path, REPOSITORY)
    assert done.stderr.startswith("Traceback") and "No module named 'not_there'" in done.stderr


def test_an_import_of_the_stacks_leaves_an_app_s_errors_alone(bare: Path) -> None:
    code = "import sys, stacks; sys.exit(sys.excepthook is not sys.__excepthook__)"
    assert run(bare, "-c", code).returncode == 0


def test_runs_takes_the_environment_of_its_checkout_from_any_folder(tmp_path: Path) -> None:
    """Outside the environment it said "operate/python: No such file"."""
    (tmp_path / "a b/operate").mkdir(parents=True)
    script = shutil.copy(REPOSITORY / "operate/runs", tmp_path / "a b/operate/runs")
    done = run(script, "list", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith(f"run `make setup` once in {tmp_path / 'a b'}\n")
    python = tmp_path / "a b/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\necho "$PYTHONPATH:" "$@"\n')
    python.chmod(0o755)
    linked = python.with_name("runs")
    linked.symlink_to(script)
    for command in (script, linked):
        assert run(command, "list", folder=tmp_path).stdout == f"{tmp_path}/a b: -m operate list\n"


def test_make_passes_each_path_with_a_space_as_one_word(tmp_path: Path) -> None:
    checkout = tmp_path / "a folder"
    names = ("", "userdata/", "stacks/checkov/")
    files = [f"{name}requirements.txt" for name in names] + ["userdata/requirements-xxhash.txt"]
    for name in ("Makefile", "package-lock.json", *files):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, checkout / name)
    make = ("make", "--dry-run", "--always-make", f"PYTHON={sys.executable}", "TORCH=cpu")
    given = ("PROGRAM=my program", "SOURCE=my source", "DATA=my data")
    done = run(*make, *given, "setup", "demo", ".venv-checkov/.ready", folder=checkout)
    commands = done.stdout.replace("\\\n", "").splitlines()
    lines = [line for line in commands if str(checkout) in line or "my program" in line]
    found = {word for line in lines for word in shlex.split(line)}
    assert {f"{checkout}/operate/runs", "my program", "my source", "my data"} <= found
    assert not any(word.startswith("folder/") for word in found), found


def test_make_leaves_the_settings_behind_that_would_mislead_its_commands(tmp_path: Path) -> None:
    """With UV_SYSTEM_PYTHON, setup emptied the user's Python; from a hook, a test committed."""
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    with (tmp_path / "Makefile").open("a") as file:
        file.write("shown:\n\t@env\n")
    names = ("PYTHONSAFEPATH", "PYTHONHOME", "PIP_TARGET", "GIT_DIR", "GIT_INDEX_FILE")
    given = {**os.environ, **dict.fromkeys(names, "1"), "PIP_USER": "1", "PYTHONPATH": "mine"}
    make = ["make", "--no-print-directory", f"PYTHON={sys.executable}", "shown"]
    shown = subprocess.run(make, cwd=tmp_path, env=given, stdout=subprocess.PIPE, text=True).stdout
    seen = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    assert not {*names} & seen.keys()
    assert seen["PIP_USER"] == "0" and seen["PYTHONPATH"] == "mine"
    words = (
        "make",
        "--dry-run",
        "--always-make",
        ".venv/.ready",
        ".venv-checkov/.ready",
        "TORCH=cpu",
    )
    commands = run(*words).stdout.replace("\\\n", "").splitlines()
    installs = [line for line in commands if "uv pip" in line]
    assert len(installs) == 3 and all(" --python .venv" in line for line in installs), installs


@pytest.mark.parametrize("gone", [False, True], ids=["another Python", "a Python that is gone"])
def test_an_environment_of_another_python_is_made_anew(tmp_path: Path, gone: bool) -> None:
    """It mixed both ("cd: too many arguments"), or ended in "No such file or directory"."""
    for name in ("Makefile", "package-lock.json", "requirements.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    bin = tmp_path / ".venv/bin"
    bin.mkdir(parents=True)
    (tmp_path / ".venv/lib/python3.12/site-packages").mkdir(parents=True)
    for name in (".ready", "wheels"):
        (tmp_path / ".venv" / name).touch()
    if gone:
        (bin / "python").symlink_to(tmp_path / "gone")
    else:
        (bin / "python").write_text("#!/bin/bash\n[[ $1 != -V ]] || echo Python 3.12.1\n")
        (bin / "python").chmod(0o755)
        (tmp_path / ".venv/.ready").unlink()
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\ncase $1 in -V) echo Python 3.11.7 ;; -m) ls .venv .venv/*; exit 3 ;; esac\n"
    )
    python.chmod(0o755)
    done = run("make", f"PYTHON={python}", ".venv/.ready", folder=tmp_path)
    assert done.returncode == 2 and "wheels" in done.stdout, done.stdout + done.stderr
    assert "bin" not in done.stdout and "lib" not in done.stdout


def test_each_target_that_synthesizes_takes_a_size() -> None:
    """Those that ignored it showed, or deployed, another one."""
    targets = ("synth", "diff", "review", "doctor", "deploy", "destroy")
    done = run("make", "--dry-run", *targets, "SIZE=g6.xlarge", "ARGS=-c run_id=a")
    commands = [line for line in done.stdout.splitlines() if "-c run_id=a" in line]
    assert len(commands) == 8  # deploy and destroy call the doctor first
    assert all(command.endswith(" -c size=g6.xlarge -c run_id=a") for command in commands)


def test_fails_to_test_what_changed_since_an_unknown_commit(tmp_path: Path) -> None:
    """It ran the whole suite behind git's refusal."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in ("Makefile", "package-lock.json", "pyproject.toml", ".ci/rooms.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for lock in ("", "-dev", "-examples", "-formats"):
        (tmp_path / f"requirements{lock}.txt").touch()
    for stamp in (".ready", ".dev", ".examples", ".formats"):
        (tmp_path / ".venv" / stamp).touch()
    python = tmp_path / ".venv/bin/python"
    python.write_text(
        f'#!/bin/bash\n[[ $1 == .ci/* ]] && exec {shlex.quote(sys.executable)} "$@"\necho tested\n'
    )
    python.chmod(0o755)
    done = run("make", "test-changed", "BASE=typo", folder=tmp_path)
    assert done.returncode == 2 and "tested" not in done.stdout
    assert done.stderr.splitlines()[0] == "fatal: bad revision 'typo'"
    assert len(done.stderr.splitlines()) == 2, done.stderr
