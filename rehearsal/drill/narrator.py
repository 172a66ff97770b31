"""Relays the machines' logs to the terminal."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rehearsal.drill.fleet import Life


@dataclass(kw_only=True, slots=True)
class Narrator:
    """Relays each new log line of a machine once, after its instance's id."""

    say: Callable[[str], None]
    _relayed: dict[str, int] = field(default_factory=dict)

    def relay(self, life: Life) -> None:
        """Say every complete line that the machine has logged since the last call."""
        lines = life.machine.log_lines()
        relayed = self._relayed.get(life.instance.id, 0)
        for line in lines[relayed:]:
            self.say(f"{life.instance.id}: {line}")
        self._relayed[life.instance.id] = len(lines)
