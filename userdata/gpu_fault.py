"""Say whether a GPU of this machine has failed, according to the kernel, nvidia-smi or trainer.

Only errors that NVIDIA's catalog attributes to hardware or driver count; an illegal address is the
program's fault. Exit status 0 with one sentence, or 1. Run: python3 -m userdata.gpu_fault
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

from userdata.machine import machine_path

KERNEL_LOG = "/dev/kmsg"
TRAINING_LOG = "/var/log/training/training.log"
TAIL_BYTES = 65_536
RECORD_BYTES = 8192
# Many times what nvidia-smi takes, and a process to end that was killed.
SMI_SECONDS, END_SECONDS = 60.0, 10.0
# https://docs.nvidia.com/deploy/xid-errors: a program cannot cause any of these.
HARDWARE_XIDS = {
    46: "stopped processing",
    48: "uncorrectable memory error",
    62: "internal micro-controller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP timeout",
    120: "GSP error",
    136: "NVLink could not be trained",
    140: "unrecovered memory error",
    143: "initialization failed",
}
XID = re.compile(r"NVRM: Xid \((?P<gpu>[^)]*)\): (?P<number>\d+)")
# The driver's own verdict after an error; None and "Drain P2P" leave the GPU usable.
ACTION = re.compile(r": 154, GPU recovery .* to \w+ \((?P<action>[^)]*(Reset|Reboot|FLR)[^)]*)\)")
ROWS = ["gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure"]
# The runtime's own words: cudaGetErrorString of the 3xx/8xx errors that hardware or driver raise.
# Other libraries say "no CUDA-capable device" where the script wants none.
CUDA = re.compile(
    r"uncorrectable (ECC|NVLink) error|GPU is lost|fallen off the bus"
    r"|(error( \d+)?:|Cuda failure( \d+)?) '?"  # torch's or NCCL's
    r"(no CUDA-capable device|(CUDA-capable )?device\S* \S+ busy or unavailable)"
    r"|CUDA error: (device unavailable|hardware stack error|system not yet initialized)"
    r"|Driver/library version mismatch",
    re.IGNORECASE,
)


def kernel_messages(path: Path) -> Iterator[str]:
    """Yield what the kernel has logged since the machine started; nothing if there is no log."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    with contextlib.closing(os.fdopen(log, "rb", buffering=0)) as file:
        while True:
            try:
                record = file.read(RECORD_BYTES)
            except BrokenPipeError:
                continue  # The kernel has dropped this record.
            if not record:  # None: no more records for now.
                return
            yield record.decode(errors="replace")


def last_lines(path: Path) -> list[str]:
    """Return the last lines of the trainer's log."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def rows_fault() -> str | None:
    """Return which GPU has broken memory rows that await its reset or have no spare left."""
    command = ["nvidia-smi", f"--query-remapped-rows={','.join(ROWS)}", "--format=csv,noheader"]
    try:
        process = Popen(command, stdout=PIPE, stderr=DEVNULL, text=True)
    except OSError:
        return None
    # Not `run`, which would wait without a limit for the process that it has killed. One that ends
    # then was only slow.
    for seconds in (SMI_SECONDS, END_SECONDS):
        try:
            rows, _ = process.communicate(timeout=seconds)
            break
        except TimeoutExpired:
            process.kill()
    else:
        return "a GPU of this machine failed: nvidia-smi hangs in the kernel, which cannot end it"
    if process.returncode != 0:
        return None  # No GPU, or none that nvidia-smi can query: torch says what is wrong.
    for line in rows.splitlines():
        gpu, *is_so = (part.strip() for part in line.split(","))
        for value, what in zip(is_so, ("wait for its reset", "have no spare left"), strict=False):
            if value in ("1", "Yes"):
                return f"GPU {gpu} of this machine failed: broken memory rows {what}"
    return None


def find_fault() -> str | None:
    """Return one sentence about the GPU that failed; None if no failure is known."""
    for message in kernel_messages(machine_path(KERNEL_LOG)):
        for found in XID.finditer(message):
            what = HARDWARE_XIDS.get(int(found["number"]))
            if action := ACTION.search(message):
                what = action["action"]
            if what:
                return f"GPU {found['gpu']} of this machine failed: Xid {found['number']}, {what}"
    if fault := rows_fault():
        return fault
    for line in reversed(last_lines(machine_path(TRAINING_LOG))):
        if CUDA.search(line):
            return f"a GPU of this machine failed: {line.strip()}"
    return None


def main() -> int:
    """Print the fault, if there is one."""
    fault = find_fault()
    if fault is None:
        return 1
    print(fault)
    return 0


if __name__ == "__main__":
    sys.exit(main())
