"""One embedded AWS for each test file, and a network and template for fleets in it."""

from collections.abc import Iterator

import pytest

from embedded_aws import EmbeddedAws
from tests.embedded_aws.fleets import Fleets


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as aws:
        yield aws


@pytest.fixture
def fleets(aws: EmbeddedAws) -> Fleets:
    return Fleets(aws)
