"""Relay to the terminal what the machines of a rehearsal write to their logs."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rehearsal.drill.fleet import Life


@dataclass(kw_only=True, slots=True)
class Narrator:
    """Tell each machine's new log lines once, with the instance's id before them."""

    say: Callable[[str], None]
    _told: dict[str, int] = field(default_factory=dict)

    def tell(self, life: Life) -> None:
        """Say every complete line that the machine has written since the last call."""
        lines = life.machine.log_lines()
        told = self._told.get(life.instance.id, 0)
        for line in lines[told:]:
            self.say(f"{life.instance.id}: {line}")
        self._told[life.instance.id] = len(lines)
