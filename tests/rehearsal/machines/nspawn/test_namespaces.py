"""Which hosts can run nspawn machines, and that a signal reaches what runs in the namespaces."""

import os
import platform
import shutil
from collections.abc import Callable

import pytest

from rehearsal.machines.nspawn.namespaces import NotPossible, check_host


@pytest.mark.parametrize(
    ("system", "user", "which", "says"),
    [
        ("Darwin", 0, shutil.which, "nspawn machines need Linux, and this is Darwin"),
        ("Linux", 1000, shutil.which, "nspawn machines need root"),
        ("Linux", 0, lambda _: None, "apt-get install dnsmasq-base iproute2 mmdebstrap openssl"),
    ],
)
def test_fails_in_one_sentence_where_there_can_be_no_machine(
    system: str,
    user: int,
    which: Callable[[str], str | None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", which)
    with pytest.raises(NotPossible, match=says):
        check_host()
