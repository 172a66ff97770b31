"""One embedded AWS for each test file."""

from collections.abc import Iterator

import pytest

from rehearsal.aws import EmbeddedAws


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as aws:
        yield aws
