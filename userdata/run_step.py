"""Run one boot step: pass on its output, log `[ok] step: what` or `[failed] step: why`.

The step's last line says what it did, or why it failed and what to do. A failed step is retried
twice, unless it would fail on any machine (exit status 78) or hangs, as with a broken driver: it
neither ends nor gets anything done (step_progress.py). The event boot-<step> also records its
seconds. Run: python3 -m userdata.run_step STEP COMMAND ...
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from contract.errors import Exit
from userdata.events import leave_event
from userdata.machine import machine_path
from userdata.step_progress import StepProgress

ATTEMPTS = 3
RETRY_SECONDS = 10.0
# Three times what importing torch takes from a fresh root volume. If a machine hung for longer than
# the Guard waits for a heartbeat, the run would end. It counts from the step's last progress.
LIMIT_SECONDS = 1200.0
# How often the progress is measured, and sent if there is any.
PROGRESS_SECONDS = 60.0
# It waits for an upload, and its duration depends on the dataset's size.
WITHOUT_LIMIT = "dataset"
HUNG = 124  # as timeout(1) reports it
# After an unexpected error, the reason stands above the line that names the command.
LINES_OF_FAILURE = 3


def run(
    progress: StepProgress, step: str, command: Sequence[str], limit_seconds: float
) -> tuple[int, str]:
    """Run the command once; return its status, and what it did or why it failed."""
    lines: list[str] = []
    ended = threading.Event()
    # Not `with`: it would wait for a child that hangs in the kernel, which nothing can kill.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, limit_seconds)
    watched = (progress, limit_seconds, ended)
    threading.Thread(target=_watch, args=watched, name="progress", daemon=True).start()
    try:
        for line in process.stdout:
            if text := line.strip():
                # The last line is held back for the verdict.
                if lines:
                    print(f"     {step}: {lines[-1]}", flush=True)
                lines.append(text)
        status = process.wait()
    except TimeoutError:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        status = HUNG
        lines.append(f"it neither ended nor got anything done for {limit_seconds:g} s")
    finally:
        ended.set()
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the other thread may just set it again
        signal.setitimer(signal.ITIMER_REAL, 0)
        process.stdout.close()
    if status == 0:
        return 0, lines[-1] if lines else "done"
    num_lines = 1 if status == Exit.CONFIG else LINES_OF_FAILURE  # a refusal is one sentence
    return status, " / ".join(lines[-num_lines:]) or f"exit status {status}"


def _watch(progress: StepProgress, limit_seconds: float, ended: threading.Event) -> None:
    """Give the step its time again whenever it has got something done, and report it."""
    every = float(os.environ.get("PROGRESS_SECONDS", PROGRESS_SECONDS))
    while not ended.wait(every):
        if progress.advances() and not ended.is_set():
            signal.setitimer(signal.ITIMER_REAL, limit_seconds)
            progress.send()


def _hangs(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def main() -> int:
    """Run the step, with retries if needed; return 0, 78 if the run is at fault, or 1."""
    step, command = sys.argv[1], sys.argv[2:]
    wait_seconds = float(os.environ.get("STEP_RETRY_SECONDS", RETRY_SECONDS))
    limit_seconds = float(os.environ.get("STEP_LIMIT_SECONDS", LIMIT_SECONDS))
    if step == WITHOUT_LIMIT:
        limit_seconds = 0
    progress = StepProgress(step)
    for attempt in range(1, ATTEMPTS + 1):
        started = time.monotonic()
        status, message = run(progress, step, command, limit_seconds)
        seconds = round(time.monotonic() - started, 3)
        if status in (0, Exit.CONFIG, HUNG) or attempt == ATTEMPTS:
            break
        message = f"attempt {attempt} of {ATTEMPTS} failed: {message}"
        print(f"[retry] {step}: {message}; again in {wait_seconds:g} s", flush=True)
        leave_event(f"boot-{step}", "info", seconds=seconds, message=message)
        time.sleep(wait_seconds)
        wait_seconds *= 2
    verdict = "ok" if status == 0 else "failed"
    if status != 0:
        # service_failed.sh reads the reason here; written first, as the disk may be full.
        machine_path("/run/training/boot-failure").write_text(f"{step}: {message}\n")
    print(f"[{verdict}] {step}: {message} ({seconds:.1f} s)", flush=True)
    leave_event(f"boot-{step}", verdict, seconds=seconds, message=message)
    return status if status in (0, Exit.CONFIG) else 1


if __name__ == "__main__":
    sys.exit(main())
