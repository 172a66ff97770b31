"""Check that this interpreter imports torch and that each of the machine's NVIDIA GPUs computes.

On the first machine of an image, it records what it has read for the next ones. Run:
PYTHONPATH=. PYTHON userdata/import_torch.py
"""

import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from userdata import read_ahead
from userdata.machine import machine_path

NVIDIA = "0x10de"
# PCI base class 03 is a display controller: https://pcisig.com, Class Code and Capability ID.
DISPLAY = "0x03"


def num_gpus_on_bus(devices: Path) -> int:
    """Count the NVIDIA display controllers among the PCI devices."""
    return sum(
        (device / "vendor").read_text().strip() == NVIDIA
        and (device / "class").read_text().startswith(DISPLAY)
        for device in devices.glob("*")
    )


def find_fault(devices: Path, num_of_size: int) -> str | None:
    """Return what is wrong with the GPUs, in one sentence; None without a PCI bus."""
    if not devices.exists():
        return None
    seen, there = torch.cuda.device_count(), num_gpus_on_bus(devices)
    if there < num_of_size:
        return f"{there} NVIDIA GPUs are on the PCI bus, but the size has {num_of_size}"
    if seen < there:
        return (
            f"torch {torch.__version__} sees {seen} of {there} NVIDIA GPUs: one has failed, or the "
            "driver does not match (context pytorch_ami_parameter)"
        )
    for index in range(seen):
        try:
            torch.ones(1, device=f"cuda:{index}").item()
        except RuntimeError as error:
            return f"GPU {index} of {seen} does not compute: {str(error).splitlines()[0]}"
    return None


def record() -> None:
    """Record what was read; a failure does not stop the boot."""
    # Torch imports its compiler with the first optimizer: 800 files that the first step waits for.
    with suppress(ImportError):
        importlib.import_module("torch._dynamo")
    try:
        num_blocks = read_ahead.record(machine_path(read_ahead.RECORDED))
    except OSError as error:
        print(f"what was read is not recorded: {error}")
    else:
        print(f"{num_blocks} blocks of 512 KiB recorded for the next machines of this image")


def main() -> int:
    """Print what torch sees; fail if a GPU is missing: training would run without it."""
    devices = machine_path("/sys/bus/pci/devices")
    fault = find_fault(devices, int(os.environ["NUM_GPUS"]))
    if fault is not None:
        print(fault)
        return 1
    if not machine_path(read_ahead.FOUND).exists():
        record()
    seen = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(seen)})
    print(f"torch {torch.__version__}, {seen} GPUs {', '.join(names)}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
