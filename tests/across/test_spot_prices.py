"""The embedded AWS answers what sizing asks of EC2."""

from datetime import UTC, datetime

from embedded_aws import EmbeddedAws
from sizing.catalogue import refresh


def test_the_embedded_aws_answers_for_spot_prices() -> None:
    with EmbeddedAws() as aws:
        found = dict(refresh.spot_prices(aws.client("ec2"), ["g5.xlarge"], datetime.now(UTC)))
    assert set(found) == {"g5.xlarge"}
    assert "us-east-1a" in found["g5.xlarge"]
