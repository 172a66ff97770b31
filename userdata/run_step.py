"""Run one boot step: pass on its output, log `[ok] step: what` or `[failed] step: why`.

The step's last line says what it did, or why it failed and what to do. The event boot-<step> also
records its seconds. Run: python3 -m userdata.run_step STEP COMMAND ...
"""

import subprocess
import sys
import time

from userdata.events import leave_event
from userdata.machine import machine_path

# After an unexpected error, the reason is above the line that names the command.
LINES_OF_FAILURE = 3


def main() -> int:
    """Run the step and exit with its status."""
    step, command = sys.argv[1], sys.argv[2:]
    started = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if text := line.strip():
                # The last line is held back for the verdict below.
                if lines:
                    print(f"     {step}: {lines[-1]}", flush=True)
                lines.append(text)
    seconds = round(time.monotonic() - started, 3)
    status = process.returncode
    if status == 0:
        message = lines[-1] if lines else "done"
    else:
        message = " / ".join(lines[-LINES_OF_FAILURE:]) or f"exit status {status}"
        # bootstrap.sh reads the reason here when it gives up.
        machine_path("/run/training/boot-failure").write_text(f"{step}: {message}\n")
    verdict = "ok" if status == 0 else "failed"
    print(f"[{verdict}] {step}: {message} ({seconds:.1f} s)", flush=True)
    leave_event(f"boot-{step}", verdict, seconds=seconds, message=message)
    return status


if __name__ == "__main__":
    sys.exit(main())
