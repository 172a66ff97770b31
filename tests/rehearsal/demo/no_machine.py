"""A machine that is never started, and the life of such a one."""

from pathlib import Path
from typing import Any

from rehearsal.demo.fleet import BootableMachine, MachineLife
from rehearsal.machines.metadata import RehearsedInstance


class NoMachine:
    """A machine that is never started."""

    @property
    def metadata(self) -> Any:
        return self

    def start(self) -> None: ...

    def notice(self, seconds: float) -> None: ...

    def rebalance(self) -> None: ...

    def shut_down(self) -> None: ...

    @property
    def is_off(self) -> bool:
        return True

    def kill(self) -> int:
        return 0

    def execute(self, *command: str) -> str:
        return ""

    def log_lines(self) -> list[str]:
        return []

    @property
    def user_data_file(self) -> Path:
        return Path("nowhere")

    @property
    def metrics_file(self) -> Path:
        return Path("nowhere")


def life(
    machine: BootableMachine | None = None, *, market: str = "spot", **more: Any
) -> MachineLife:
    """The life of an instance on this machine."""
    instance = RehearsedInstance(id="i-1", market=market)
    given: dict[str, Any] = {"started": 0.0, "template_user_data": b"", **more}
    return MachineLife(instance=instance, machine=machine or NoMachine(), **given)
