"""Starting again: nothing of the last time is left."""

from rehearsal.aws import EmbeddedAws


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
