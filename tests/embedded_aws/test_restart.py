"""Starting again: nothing of the last time is left."""

from embedded_aws import EmbeddedAws
from embedded_aws.capacity import Capacity
from embedded_aws.fleet import CAPACITY


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
    assert CAPACITY[0].notice_seconds == Capacity().notice_seconds


def test_spot_prices_are_the_caller_s_for_the_sizes_that_it_knows() -> None:
    def price(size: str) -> float:
        if size != "g5.xlarge":
            raise ValueError(size)
        return 0.5

    with EmbeddedAws(spot_usd=price) as aws:
        sizes = ["g5.xlarge", "m5.large"]
        found = aws.client("ec2").describe_spot_price_history(InstanceTypes=sizes)
    prices = {each["InstanceType"]: each["SpotPrice"] for each in found["SpotPriceHistory"]}
    assert prices == {"g5.xlarge": "0.5", "m5.large": "0.00001"}
