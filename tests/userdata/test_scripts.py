"""Rules for the boot programs as files."""

import importlib.util
import re
from pathlib import Path

import pytest

from contract.errors import Exit
from rehearsal.machines.services import load_units
from tests.userdata.rig import REPOSITORY, USERDATA
from training.registry import WORKLOADS

SCRIPTS = sorted(USERDATA.rglob("*.sh"))
LOCK = REPOSITORY / "requirements.txt"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_the_first_error_and_stay_small(path: Path) -> None:
    text = path.read_text()
    assert "set -o errexit -o nounset -o pipefail" in text
    assert text.count("\n") <= 80
    assert max(map(len, text.splitlines())) <= 100


def test_every_unit_is_honoured_by_process_machines() -> None:
    units = load_units(USERDATA / "units")
    training = units["training.service"]
    assert training.restart == "on-failure"
    assert training.start_limit_burst == 3
    assert training.success_statuses == {Exit.INTERRUPTED}
    assert training.prevent_statuses == {Exit.USER, Exit.MACHINE, Exit.INTERRUPTED}
    # Without it, systemd 254 and newer would fail the run at the first failure (systemd#33710).
    assert training.restart_mode == "direct"


def test_the_trainer_may_open_as_many_files_as_a_shell_s_hard_limit_grants() -> None:
    """DataLoader's workers share a file for each tensor; growth maps each shard of its text."""
    text = (USERDATA / "units/training.service").read_text()
    assert "\nLimitNOFILE=524288\n" in text


def test_scripts_spell_the_exit_codes_of_the_contract() -> None:
    assert f"exit {Exit.CONFIG}\n" in (USERDATA / "lib.sh").read_text()
    assert f"exit {Exit.MACHINE}\n" in (USERDATA / "run_training.sh").read_text()
    decides = (USERDATA / "service_failed.sh").read_text()
    assert f"users_mistake={Exit.USER}\n" in decides
    assert f"users_mistake={Exit.CONFIG}\n" in decides
    assert f"{Exit.MACHINE} && status != {Exit.STORE} && status != {Exit.LEASE_LOST})" in decides
    assert f"status == {Exit.NO_MANIFEST}" in (USERDATA / "steps/dataset.sh").read_text()


def test_every_program_that_a_unit_starts_exists() -> None:
    for unit in load_units(USERDATA / "units").values():
        for command in (unit.exec_start, *unit.exec_stop_post):
            name = command[-1].replace(".", "/") + ".py" if "-m" in command else command[1]
            if name == "-ec":
                name = command[2].split()[-1]
            name = name.removeprefix("bundle/")
            assert (REPOSITORY / name).exists(), name


def test_requirements_of_a_workload_are_named_after_the_modules_that_they_bring() -> None:
    own = sorted(USERDATA.glob("requirements-*/*.txt"))
    assert {path.parent.name.removeprefix("requirements-") for path in own} <= set(WORKLOADS)
    for path in own:
        assert path.read_text().count("==") == 1
        assert importlib.util.find_spec(path.stem), path


def test_requirements_of_the_machine_are_those_of_the_repository() -> None:
    def blocks(text: str) -> set[str]:
        return set(re.findall(r"^[a-z0-9-]+==[^\n]*(?:\n    [^\n]*)*", text, re.MULTILINE))

    # The machine's pins are for any Python.
    lock = blocks(re.sub(r" ; python_full_version.*\\", r" \\", LOCK.read_text()))
    for name, num in (
        ("requirements.txt", 8),
        ("requirements-numpy.txt", 1),
        ("requirements-xxhash.txt", 1),
        ("requirements-detection/scipy.txt", 1),
        ("requirements-detection/faster_coco_eval.txt", 1),
    ):
        machine = blocks((USERDATA / name).read_text())
        assert len(machine) == num
        assert machine <= lock
