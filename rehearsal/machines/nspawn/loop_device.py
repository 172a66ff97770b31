"""A file as a block device, which the kernel detaches once nobody has it open."""

import errno
import fcntl
import os
import struct
from pathlib import Path

# linux/loop.h
LOOP_CTL_GET_FREE = 0x4C82
LOOP_CONFIGURE = 0x4C0A
LO_FLAGS_AUTOCLEAR = 4
BLOCK_BYTES = 512
# struct loop_config: fd and block size, then struct loop_info64, of which only lo_flags is set.
_CONFIG_BYTES = 304
_FLAGS_AT = 60


class LoopDevice:
    """Attached while it is open here or mounted anywhere."""

    def __init__(self, file: Path) -> None:
        control = os.open("/dev/loop-control", os.O_RDWR)
        backing = os.open(file, os.O_RDWR)
        try:
            while True:
                self.number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                self._device = os.open(self.path, os.O_RDWR)
                try:
                    fcntl.ioctl(self._device, LOOP_CONFIGURE, _config(backing))
                    return
                except OSError as error:
                    os.close(self._device)
                    if error.errno != errno.EBUSY:
                        raise
                    # Somebody else took it in between.
        finally:
            os.close(backing)
            os.close(control)

    @property
    def path(self) -> Path:
        """The device's file."""
        return Path(f"/dev/loop{self.number}")

    def close(self) -> None:
        """Close it here: it is detached once it is mounted nowhere."""
        os.close(self._device)


def _config(backing: int) -> bytes:
    config = bytearray(_CONFIG_BYTES)
    struct.pack_into("=II", config, 0, backing, BLOCK_BYTES)
    struct.pack_into("=I", config, _FLAGS_AT, LO_FLAGS_AUTOCLEAR)
    return bytes(config)
