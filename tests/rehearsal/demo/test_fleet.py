"""What a machine ran is compared with the launch template, byte for byte."""

from dataclasses import dataclass
from pathlib import Path

from rehearsal.demo.fleet import MachineLife, user_data_faults
from tests.rehearsal.demo.no_machine import NoMachine, life

TEMPLATE = b"#!/bin/bash\necho hello\n"


@dataclass
class Booted(NoMachine):
    """A machine that has got its user data."""

    file: Path
    metrics: Path = Path("nowhere")

    @property
    def user_data_file(self) -> Path:
        return self.file

    @property
    def metrics_file(self) -> Path:
        return self.metrics


def booted(file: Path, metrics: Path = Path("nowhere")) -> MachineLife:
    return life(Booted(file, metrics), template_user_data=TEMPLATE)


def test_one_byte_of_other_user_data_is_a_fault_that_names_its_file(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    same.write_bytes(TEMPLATE)
    other.write_bytes(TEMPLATE.rstrip())
    assert user_data_faults([booted(same), booted(tmp_path / "ended before it got any")]) == []
    (fault,) = user_data_faults([booted(same), booted(other)])
    assert fault == f"i-1 ran other user data than the template's: {other}"


def test_user_data_that_nobody_finds_are_a_fault_of_a_machine_that_has_trained(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    assert len(user_data_faults([booted(tmp_path / "elsewhere", metrics)])) == 1
