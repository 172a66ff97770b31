"""Check that this interpreter imports torch and that torch sees the machine's NVIDIA GPUs."""

import os
import sys
from pathlib import Path

import torch

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


def main() -> int:
    """Print what torch sees; fail if it misses a GPU, because training would run on the CPU."""
    seen = torch.cuda.device_count()
    there = num_gpus_on_bus(Path(os.environ.get("MACHINE_ROOT", "") + "/sys/bus/pci/devices"))
    if there > seen:
        print(f"torch {torch.__version__} sees {seen} of {there} NVIDIA GPUs: the driver does not")
        print("match; use another Deep Learning AMI (context pytorch_ami_parameter)")
        return 1
    names = sorted({torch.cuda.get_device_name(index) for index in range(seen)})
    print(f"torch {torch.__version__}, {seen} GPUs {', '.join(names)}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
