"""Machines that boot a few lines of shell; none outlives its test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rehearsal.machines.metadata import MetadataServer, RehearsedInstance
from rehearsal.machines.process import ProcessMachine
from rehearsal.machines.quirks import Quirks

Power = Callable[..., ProcessMachine]


@pytest.fixture
def power(tmp_path: Path) -> Iterator[Power]:
    """Return a function that powers a machine on with a script and units by name."""
    machines: list[ProcessMachine] = []

    def power_on(script: str, quirks: Quirks | None = None, **units: str) -> ProcessMachine:
        lines = ["#!/bin/bash", "set -o errexit", 'mkdir -p "$MACHINE_ROOT/etc/systemd/system"']
        for name, text in units.items():
            path = f"$MACHINE_ROOT/etc/systemd/system/{name}.service"
            lines += [f"cat > \"{path}\" <<'END'", text, "END"]
        machine = ProcessMachine(
            folder=tmp_path / f"machine-{len(machines)}",
            environment={"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "mine"},
            metadata=MetadataServer(
                instance=RehearsedInstance(
                    id="i-1", user_data="\n".join([*lines, script, ""]).encode()
                )
            ),
            quirks=quirks or Quirks(),
        )
        machines.append(machine)
        machine.start()
        return machine

    yield power_on
    for machine in machines:
        machine.kill()
        assert machine.processes() == []
