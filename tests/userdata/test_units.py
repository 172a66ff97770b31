"""The verdict of systemd itself on the units: no complaint, and how exposed each of them is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rehearsal.machines.services import load_units
from tests.userdata.rig import REPOSITORY

UNITS = REPOSITORY / "userdata/units"
# The exposure of each by `systemd-analyze security` (10: not confined at all). It may only fall.
# Newer versions of systemd than 252 give up to 0.2 less.
MOST_EXPOSED = {
    "interruption-handler.service": 1.8,
    "training-boot-failed.service": 9.6,
    "training-boot.service": 9.6,
    "training-events.service": 2.1,
    "training-failed.service": 9.6,
    "training-metrics.service": 2.1,
    "training.service": 9.6,
}
# New in systemd 254; the AMI's Ubuntu 24.04 has 255, Debian 12 has 252.
NEWER = "Unknown key 'RestartMode' in section [Service], ignoring."

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)


def analyze(*words: str) -> str:
    """Return the output of systemd-analyze, complaints included."""
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *words], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def complaints(folder: Path) -> set[str]:
    printed = analyze("verify", *map(str, sorted(folder.glob("*.service")))).splitlines()
    return {re.sub(r"^\S+?([^/]+\.service):\d+: ", r"\1: ", line) for line in printed}


@needs_systemd
def test_systemd_has_no_complaint_but_about_a_directive_that_is_newer_than_it() -> None:
    version = re.match(r"systemd (\d+)", analyze("--version"))
    assert version is not None
    expected = {f"training.service: {NEWER}"} if int(version[1]) < 254 else set()
    assert complaints(UNITS) == expected


@needs_systemd
def test_systemd_complains_of_a_value_that_it_cannot_read(tmp_path: Path) -> None:
    """A misspelt sandbox would be ignored on the machine, and the service run without it."""
    units = shutil.copytree(UNITS, tmp_path / "units")
    handler = units / "interruption-handler.service"
    text = handler.read_text()
    handler.write_text(text.replace("ProtectSystem=strict", "ProtectSystem=strictly"))
    assert any("value, ignoring: strictly" in line for line in complaints(units))


@needs_systemd
@pytest.mark.parametrize("name", MOST_EXPOSED)
def test_a_unit_is_no_more_exposed_than_before(name: str) -> None:
    printed = analyze("security", "--offline=true", str(UNITS / name))
    found = re.search(rf"exposure level for {name}: ([\d.]+) ", printed)
    assert found is not None, printed
    assert float(found[1]) <= MOST_EXPOSED[name], printed


def test_every_unit_has_its_exposure() -> None:
    assert {path.name for path in UNITS.glob("*.service")} == MOST_EXPOSED.keys()


@pytest.mark.parametrize("name", ["training-boot.service", "training.service"])
def test_what_uses_gpus_starts_after_nvswitch_is_set_up(name: str) -> None:
    assert "nvidia-fabricmanager.service" in load_units(UNITS)[name].after


def test_at_shutdown_the_data_volume_stays_mounted_until_the_trainer_has_saved() -> None:
    assert "data.mount" in load_units(UNITS)["training.service"].after
