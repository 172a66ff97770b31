"""Programs that the rehearsal starts, such as the pinned CDK CLI; none is left behind."""

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LINES_KEPT = 40
_POLL_SECONDS = 0.1


class ChildFailed(RuntimeError):
    """The exit of a program with a status other than 0."""


@dataclass(kw_only=True, slots=True)
class Child:
    """One running program."""

    name: str
    process: subprocess.Popen[str]
    tail: deque[str]
    reader: threading.Thread

    def wait(self) -> int:
        """Wait until the program exits and its last line is read; return its exit status."""
        status = self.process.wait()
        self.reader.join()
        return status

    def expect(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait, calling `meanwhile`; raise ChildFailed with the last lines unless it succeeded."""
        while meanwhile is not None and self.process.poll() is None:
            meanwhile()
            time.sleep(_POLL_SECONDS)
        status = self.wait()
        if status != 0:
            lines = "\n".join(f"    {line}" for line in self.tail)
            raise ChildFailed(f"{self.name} failed with exit status {status}:\n{lines}")

    def kill(self) -> None:
        """Send SIGKILL to the program's entire process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.reader.join()


@dataclass(kw_only=True, slots=True)
class Children:
    """Starts programs, and kills all of them on leaving the context."""

    say: Callable[[str], None]
    environment: Mapping[str, str]
    folder: Path
    _started: list[Child] = field(default_factory=list)

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._started:
            child.kill()

    def start(self, name: str, command: Sequence[str], **variables: str) -> Child:
        """Start a program; its lines go to `say`, and the last ones are kept."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        tail: deque[str] = deque(maxlen=_LINES_KEPT)
        reader = threading.Thread(target=self._relay, args=(name, process, tail))
        reader.start()
        child = Child(name=name, process=process, tail=tail, reader=reader)
        self._started.append(child)
        return child

    def _relay(self, name: str, process: subprocess.Popen[str], tail: deque[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if text := line.rstrip():
                    tail.append(text)
                    self.say(f"{name}: {text}")


def run_cdk(
    children: Children, name: str, *arguments: str, meanwhile: Callable[[], None] | None = None
) -> None:
    """Run one CLI command and wait for it, calling `meanwhile`; raise ChildFailed if it fails."""
    children.say(f"{name} ...")
    started = time.monotonic()
    start_cdk(children, name, *arguments).expect(meanwhile)
    children.say(f"{name}: {time.monotonic() - started:.1f} s")


def start_cdk(children: Children, name: str, *arguments: str) -> Child:
    """Start one CLI command; do not wait."""
    command = ["node_modules/.bin/cdk", *arguments, "--ci", "--no-color"]
    return children.start(name, command)
