"""Tests that a workload or a program resumes exactly: `check` and `torture`.

A workload's attempts: `injector` has the kills of one, `attempt` runs it, `experiment` interrupts
it and compares its run with the uninterrupted one. A program's lives: `check.lives`. Left out of
the bundle that instances run; nothing in the engine imports it. Uses training/engine,
training/preflight and the packages below them.
"""

from typing import TYPE_CHECKING

from contract import door

if TYPE_CHECKING:
    from training.proof.check.lives import Account, ExitKind, Lives
    from training.proof.injector import Injector, StatusFile, misbehaving
else:
    __getattr__ = door.of(__name__)

# fmt: off
__all__ = [
    "Account", "ExitKind", "Injector", "Lives", "StatusFile", "misbehaving",
]
