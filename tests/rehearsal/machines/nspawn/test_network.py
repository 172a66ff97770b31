"""What a machine's network card is called, and how a bucket in a host's name is found."""

from typing import Any

import pytest

from rehearsal.machines.nspawn.network import BucketInPath, Card


def test_cards_have_addresses_of_their_own_that_the_metadata_repeats() -> None:
    cards = [Card(number=number) for number in range(1, 251)]
    assert len({card.mac for card in cards}) == len({card.address for card in cards}) == 250
    about = cards[16].metadata()
    assert about["mac"] == "0e:00:00:00:00:11"
    assert about["network/interfaces/macs/0e:00:00:00:00:11/local-ipv4s"] == "10.77.1.17"


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("bucket.s3.us-east-1.amazonaws.com", "/bucket/key"),
        ("my.bucket.s3.amazonaws.com", "/my.bucket/key"),
        ("s3.us-east-1.amazonaws.com", "/key"),
        ("ec2.us-east-1.amazonaws.com", "/key"),
    ],
)
def test_a_bucket_moves_from_the_host_into_the_path(host: str, path: str) -> None:
    seen: dict[str, Any] = {}

    def application(environ: dict[str, Any], _: Any) -> list[bytes]:
        seen.update(environ)
        return []

    BucketInPath(application)({"HTTP_HOST": host, "PATH_INFO": "/key"}, None)
    assert seen["PATH_INFO"] == path
