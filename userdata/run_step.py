"""Run one boot step: pass on its output, log `[ok] step: what` or `[failed] step: why`.

The step's last line says what it did, or why it failed and what to do. A failed step is tried again
twice, unless no machine could do better (exit status 78). The event boot-<step> also records its
seconds. Run: python3 -m userdata.run_step STEP COMMAND ...
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from contract.errors import EXIT_CONFIG
from userdata.events import leave_event
from userdata.machine import machine_path

ATTEMPTS = 3
RETRY_SECONDS = 10.0
# After an unexpected error, the reason is above the line that names the command.
LINES_OF_FAILURE = 3


def run(step: str, command: Sequence[str]) -> tuple[int, str]:
    """Run the command once; return its status and what it did, or why it failed."""
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if text := line.strip():
                # The last line is held back for the verdict.
                if lines:
                    print(f"     {step}: {lines[-1]}", flush=True)
                lines.append(text)
    if process.returncode == 0:
        return 0, lines[-1] if lines else "done"
    why = " / ".join(lines[-LINES_OF_FAILURE:])
    return process.returncode, why or f"exit status {process.returncode}"


def main() -> int:
    """Run the step, again if need be; return 0, 78 if the run is at fault, or 1."""
    step, command = sys.argv[1], sys.argv[2:]
    wait_seconds = float(os.environ.get("STEP_RETRY_SECONDS", RETRY_SECONDS))
    for attempt in range(1, ATTEMPTS + 1):
        started = time.monotonic()
        status, message = run(step, command)
        seconds = round(time.monotonic() - started, 3)
        if status in (0, EXIT_CONFIG) or attempt == ATTEMPTS:
            break
        message = f"attempt {attempt} of {ATTEMPTS} failed: {message}"
        print(f"[retry] {step}: {message}; again in {wait_seconds:g} s", flush=True)
        leave_event(f"boot-{step}", "info", seconds=seconds, message=message)
        time.sleep(wait_seconds)
        wait_seconds *= 2
    verdict = "ok" if status == 0 else "failed"
    print(f"[{verdict}] {step}: {message} ({seconds:.1f} s)", flush=True)
    leave_event(f"boot-{step}", verdict, seconds=seconds, message=message)
    if status != 0:
        # service_failed.sh reads the reason here.
        machine_path("/run/training/boot-failure").write_text(f"{step}: {message}\n")
    return status if status in (0, EXIT_CONFIG) else 1


if __name__ == "__main__":
    sys.exit(main())
