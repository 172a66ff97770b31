"""Where the root image comes from, and what is said when it cannot be built."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from rehearsal.machines.commands import CommandFailed
from rehearsal.machines.nspawn import root_image
from rehearsal.machines.nspawn.namespaces import NotPossible
from rehearsal.machines.nspawn.root_image import read_source

UBUNTU = "noble http://127.0.0.1:9/ubuntu"
SAID = """I: running apt-get update...
E: Failed to fetch http://127.0.0.1:9/ubuntu/dists/noble/InRelease  Could not connect
E: mmdebstrap failed to run
"""


def test_a_suite_may_have_a_mirror() -> None:
    assert read_source("bookworm") == ("bookworm", [])
    assert read_source(UBUNTU) == ("noble", ["http://127.0.0.1:9/ubuntu"])


@pytest.mark.parametrize("text", ["", "noble http://one http://two"])
def test_fails_a_source_that_cannot_be_read(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"REHEARSAL_IMAGE is .*; set it to a suite, or to a suite and"
    ):
        read_source(text)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A mirror of Ubuntu with a keyring's package, on a host that has no keyring of Ubuntu's."""
    package = tmp_path / "ubuntu" / root_image._KEYRING_PACKAGE
    package.parent.mkdir(parents=True)
    package.write_bytes(b"keys")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("REHEARSAL_IMAGE", f"noble {tmp_path.as_uri()}/ubuntu")
    monkeypatch.setattr(root_image, "UBUNTU_KEYRING", Path("usr/share/keyrings/none.gpg"))
    return f"{tmp_path.as_uri()}/ubuntu"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[object]]:
    """The commands that were asked for; mmdebstrap fails."""
    commands: list[Sequence[object]] = []

    def run(*words: object) -> str:
        commands.append(words)
        if words[0] == "mmdebstrap":
            raise CommandFailed(f"`mmdebstrap` ended with status 25: {SAID}")
        return ""

    monkeypatch.setattr(root_image, "run", run)
    return commands


def test_fails_in_one_sentence_where_the_image_cannot_be_built(
    tmp_path: Path, mirror: str, ran: list[Sequence[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_image, "_KEYRING_SHA256", hashlib.sha256(b"keys").hexdigest())
    with pytest.raises(NotPossible) as error:
        root_image.root_image(print)
    assert str(error.value) == (
        f"the root image of noble from {mirror} could not be built "
        "(REHEARSAL_IMAGE): Failed to fetch http://127.0.0.1:9/ubuntu/dists/noble/InRelease  "
        "Could not connect"
    )
    extract, bootstrap = ran
    assert extract[:2] == ("dpkg-deb", "--extract")
    assert f"--keyring={extract[-1]}/usr/share/keyrings/none.gpg" in bootstrap
    assert bootstrap[-1] == f"deb {mirror} noble main universe"
    assert list(tmp_path.rglob("noble*")) == [], "nothing half-built is left"


def test_a_keyring_that_is_not_ubuntus_is_refused(mirror: str, ran: list[Sequence[object]]) -> None:
    found = hashlib.sha256(b"keys").hexdigest()
    with pytest.raises(NotPossible, match=f"SHA-256 of .*ubuntu-keyring_.* there is {found}, not "):
        root_image.root_image(print)
    assert ran == []


def test_fails_in_one_sentence_where_there_is_no_mirror(
    tmp_path: Path, mirror: str, ran: list[Sequence[object]]
) -> None:
    (tmp_path / "ubuntu" / root_image._KEYRING_PACKAGE).unlink()
    with pytest.raises(NotPossible, match=r"noble from .* could not be built .*No such file"):
        root_image.root_image(print)
    assert ran == []
