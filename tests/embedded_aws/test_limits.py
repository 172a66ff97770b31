"""Each of AWS's documented limits is refused as AWS does, and by its row alone."""

from typing import Any, cast

import pytest
from botocore.exceptions import ClientError

from contract.aws_limits import AwsLimit, aws_limits
from embedded_aws import EmbeddedAws
from embedded_aws.cloudformation.schema import schema_of
from tests.embedded_aws.limit_cases import CASES, NUMBER


def values(row: AwsLimit) -> tuple[Any, Any]:
    """What the row takes, and what it refuses."""
    _, taken, refused = CASES[row.name]
    if taken is not NUMBER:
        return taken, refused
    assert row.is_number
    return int(row.most), int(row.most) + 1


def test_every_row_has_a_case_and_a_page_of_aws() -> None:
    assert aws_limits().keys() == CASES.keys()
    assert len(aws_limits()) >= 60
    assert all(r.page.startswith("https://docs.aws.amazon.com/") for r in aws_limits().values())


def test_the_days_that_a_log_is_kept_are_those_of_the_schema() -> None:
    # CloudWatch Logs' own model does not have them; CloudFormation's schema does.
    schema = schema_of("AWS::Logs::LogGroup")
    assert schema is not None
    days = schema["properties"]["RetentionInDays"]["enum"]
    assert set(aws_limits()["log-retention-days"].among) == set(days)


@pytest.mark.parametrize("name", CASES)
def test_fails_what_is_beyond_a_limit_by_its_row_alone(
    aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    row, call = aws_limits()[name], CASES[name][0]
    taken, refused = values(row)
    with pytest.raises(ClientError) as error:
        call(aws.client, refused)
    answer = error.value.response
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    assert (answer["Error"]["Code"], status) == (row.code, row.status)
    call(aws.client, taken)
    monkeypatch.delitem(cast(dict[str, AwsLimit], aws_limits()), name)
    call(aws.client, refused)
