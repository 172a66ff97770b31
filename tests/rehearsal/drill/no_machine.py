"""A machine that is never started."""

from pathlib import Path


class NoMachine:
    """A machine that is never started."""

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
