"""Starting again: nothing of the last time is left."""

from embedded_aws import EmbeddedAws, spot_fleet
from embedded_aws.capacity import Capacity


def test_each_start_is_an_empty_account() -> None:
    aws = EmbeddedAws()
    for _ in range(2):
        aws.start(port=0)
        try:
            assert aws.client("s3").list_buckets()["Buckets"] == []
            assert aws.client("cloudformation").describe_stacks()["Stacks"] == []
            aws.client("s3").create_bucket(Bucket="left-over")
            aws.client("cloudformation").create_stack(
                StackName="left-over", TemplateBody='{"Resources":{"T":{"Type":"AWS::SNS::Topic"}}}'
            )
        finally:
            aws.stop()


def test_a_stopped_account_leaves_no_capacity_behind() -> None:
    """The fleets of tests on moto alone would get its notices."""
    with EmbeddedAws() as aws:
        aws.capacity.notice_seconds = 20.0
    assert spot_fleet.CAPACITY[0].notice_seconds == Capacity().notice_seconds
