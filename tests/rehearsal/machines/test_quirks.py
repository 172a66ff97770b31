"""What is wrong with a machine is what its own programs find."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rehearsal.machines.process import ProcessMachine
from rehearsal.machines.quirks import Quirks, lend_environment

Power = Callable[..., ProcessMachine]
FIND = "import importlib.util as u; print([u.find_spec(n) is not None for n in ('six', 'idna')])"


def test_a_program_hides_the_real_one_and_may_call_it(power: Power) -> None:
    say = 'if [ "$1" = wrong ]; then echo rehearsed; exit 3; fi\nexec "$real" "$@"'
    quirks = Quirks(programs={"uname": say}, environment={"COLOUR": "red"})
    machine = power("uname wrong || echo $? $COLOUR; uname -s", quirks=quirks)
    assert machine.wait(60, "3 red")
    assert machine.wait(60, "Linux" if sys.platform == "linux" else "Darwin")
    assert "rehearsed" in machine.log_lines()


def test_a_file_is_there_before_the_machine_starts(power: Power) -> None:
    quirks = Quirks(files={"/sys/bus/pci/devices/0000:00:00.0/class": "0x060000\n"})
    machine = power('cat "$MACHINE_ROOT/sys/bus/pci/devices/0000:00:00.0/class"', quirks=quirks)
    assert machine.wait(60, "0x060000")


def test_a_lent_environment_has_all_packages_but_those_it_lacks(tmp_path: Path) -> None:
    target = tmp_path / "pytorch"
    lend_environment(Path(sys.prefix), target, ("six",))
    command = [str(target / "bin/python"), "-c", FIND]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True]"
