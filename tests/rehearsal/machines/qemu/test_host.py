"""Which hosts can run QEMU machines."""

import shutil

import pytest

from rehearsal.machines.nspawn import namespaces
from rehearsal.machines.nspawn.namespaces import NotPossible
from tests.rehearsal.machines.qemu.host import check_host


def test_fails_in_one_sentence_where_qemu_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "check_host", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None if "qemu-system" in name else name)
    with pytest.raises(NotPossible, match=r"QEMU machines .* apt-get install qemu-system-x86$"):
        check_host()
