"""What the kernel says of a loop device that it does not configure."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from rehearsal.machines.nspawn.machine import LOOP_CTL_GET_FREE, LoopDevice


def test_only_a_device_that_somebody_else_took_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(errno.EBUSY, "taken"), OSError(errno.EINVAL, "refused")]
    file, opened = tmp_path / "disk", os.open
    file.touch()

    def ioctl(_: int, request: int, *__: object) -> int:
        if request == LOOP_CTL_GET_FREE:
            return 7
        raise refusals.pop(0)

    monkeypatch.setattr(os, "open", lambda *_: opened(file, os.O_RDWR))
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    with pytest.raises(OSError, match="refused"):
        LoopDevice(file)
    assert refusals == []
