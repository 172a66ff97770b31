"""Where the root image comes from, and what is said when it cannot be built."""

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
    with pytest.raises(ValueError, match=r"REHEARSAL_IMAGE is .*; give a suite, or a suite and"):
        read_source(text)


def test_fails_in_one_sentence_where_the_image_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sequence[object]] = []

    def fail(*words: object) -> str:
        seen.append(words)
        raise CommandFailed(f"`mmdebstrap` ended with status 25: {SAID}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("REHEARSAL_IMAGE", UBUNTU)
    monkeypatch.setattr(root_image, "run", fail)
    with pytest.raises(NotPossible) as error:
        root_image.root_image(print)
    assert str(error.value) == (
        "the root image of noble from http://127.0.0.1:9/ubuntu could not be built "
        "(REHEARSAL_IMAGE): Failed to fetch http://127.0.0.1:9/ubuntu/dists/noble/InRelease  "
        "Could not connect"
    )
    assert seen[0][-1] == "deb http://127.0.0.1:9/ubuntu noble main universe"
    assert list(tmp_path.rglob("noble*")) == [], "nothing half-built is left"
