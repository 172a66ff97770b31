"""Watch the metadata for a Spot notice or a rebalance recommendation; signal the trainer once.

Notice: notice.json, an event, SIGUSR1 to the main process of training.service. Rebalance: SIGUSR2.
It neither saves nor stops anything itself, and uses only the standard library. Run:
python3 -m userdata.interruption_handler
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from userdata.events import leave_event
from userdata.machine import machine_path, stop_event
from userdata.metadata import InstanceMetadata, MetadataError

NOTICE = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
# AWS recommends 5 s; polling every 2 s gains up to 3 of a notice's 120 s.
POLL_SECONDS = 2.0
SYSTEMCTL_TIMEOUT_SECONDS = 20


@dataclass(kw_only=True, slots=True)
class InterruptionHandler:
    """A poller of the metadata; files record what it passed on, so a restart does not repeat it."""

    metadata: InstanceMetadata = field(default_factory=InstanceMetadata)
    folder: Path = field(default_factory=lambda: machine_path("/run/training"))
    trouble: str = ""

    def poll(self) -> bool:
        """Poll once and pass on what is new; return True once a notice was passed on."""
        try:
            notice = self.metadata.read(NOTICE)
            # With a notice, a rebalance recommendation no longer matters.
            rebalance = None if notice else self.metadata.read(REBALANCE)
            action = None if notice is None else self._parse(notice)
        except (MetadataError, ValueError) as error:
            self._say_trouble(str(error))
            return False
        self._say_trouble("")
        if action is not None:
            self._pass_notice(action)
            return True
        if rebalance is not None:
            self._pass("rebalance", rebalance, {"recommendation": rebalance}, signal.SIGUSR2)
        return False

    def _parse(self, text: str) -> dict[str, str]:
        action = json.loads(text)
        if not isinstance(action, dict) or not {"action", "time"} <= action.keys():
            raise ValueError(f"a notice must have action and time; got {text!r}")
        return {"action": str(action["action"]), "time": str(action["time"])}

    def _say_trouble(self, trouble: str) -> None:
        """Log trouble when it starts, changes or ends, not at every poll."""
        if trouble != self.trouble:
            say(
                f"trouble, retrying: {trouble}"
                if trouble
                else "the metadata service responds again"
            )
            self.trouble = trouble

    def _pass_notice(self, action: dict[str, str]) -> None:
        if (self.folder / "stopping").exists():
            message = "expected: this machine itself sent the fleet to zero"
            tell("notice-after-stop", message, action=action["action"])
            return
        self._pass("notice", f"{action['action']} at {action['time']}", action, signal.SIGUSR1)

    def _pass(self, name: str, text: str, record: dict[str, str], number: signal.Signals) -> None:
        path = self.folder / f"{name}.json"
        is_new = not path.exists()
        if is_new:
            self._write(path, {**record, "received_at": now()})
        self._signal_once(f"{name}-signaled", number)
        # Last, as both write to the root volume, which may be full or broken.
        if is_new:
            tell(name, text)

    def _signal_once(self, name: str, number: signal.Signals) -> None:
        mark = self.folder / name
        if mark.exists():
            return
        # Marked before the signal: if this program crashes in between, the trainer still reads
        # notice.json, and a lost signal costs less than a second one.
        mark.touch()
        unit = "training.service"
        command = ["systemctl", "kill", "--kill-whom=main", f"--signal={number.name}", unit]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=SYSTEMCTL_TIMEOUT_SECONDS,
                check=False,
            )
            answer = done.stderr.strip() if done.returncode else "sent"
        except (subprocess.TimeoutExpired, OSError) as error:
            answer = str(error)
        say(f"{number.name} to {unit}: {answer}")

    def _write(self, path: Path, content: dict[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content) + "\n")
        unfinished.rename(path)


def now() -> str:
    """Return the time in the format of events."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def tell(name: str, message: str, **fields: str) -> None:
    """Leave an event, if that is possible, and print it."""
    with contextlib.suppress(OSError):
        leave_event(name, "info", message=message, **fields)
    say(f"{name}: {message}")


def say(text: str) -> None:
    """Print one line for the service's log, if that is possible."""
    # Not `print`, whose buffer would fail again at exit.
    with contextlib.suppress(OSError):
        os.write(1, f"{now()} {text}\n".encode())


def main() -> int:
    """Poll until a notice was passed on or the service is stopped."""
    stop = stop_event()
    poll_seconds = float(os.environ.get("POLL_SECONDS", POLL_SECONDS))
    handler = InterruptionHandler()
    say(f"watching {handler.metadata.endpoint} every {poll_seconds:g} s")
    while not handler.poll():
        if stop.wait(poll_seconds):
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
