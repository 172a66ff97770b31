"""A deployed function's process serves event after event, tells its errors, and is replaced."""

import io
import json
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedded_aws import EmbeddedAws
from embedded_aws.event_bus import EventBus, FunctionProcess

CODE = """
import os, time
count = 0
def handler(event, context):
    global count
    count += 1
    print("a line for the log")
    if event.get("sleeps"):
        time.sleep(60)
    return {"count": count, "half": event["number"] / event["by"], "stage": os.environ["STAGE"]}
"""


@contextmanager
def function(folder: Path, code: str) -> Iterator[FunctionProcess]:
    code_folder = folder / "guard"
    code_folder.mkdir()
    (code_folder / "index.py").write_text(code)
    process = FunctionProcess(
        handler="index.handler", variables={"STAGE": "test"}, folder=code_folder
    )
    try:
        yield process
    finally:
        process.end()


def test_one_process_answers_one_event_after_another_and_an_error_does_not_end_it(
    tmp_path: Path,
) -> None:
    with function(tmp_path, CODE) as process:
        answer, error = process.invoke({"number": 3, "by": 2}, 10)
        assert (answer, error) == ({"count": 1, "half": 1.5, "stage": "test"}, None)
        answer, error = process.invoke({"number": 3, "by": 0}, 10)
        assert answer is None
        assert error == "ZeroDivisionError: division by zero"
        answer, _ = process.invoke({"number": 4, "by": 1}, 10)
        assert answer is not None
        assert answer["count"] == 3
        folder = tmp_path / "guard"
        assert process.serves("index.handler", {"STAGE": "test"}, folder)
        assert not process.serves("index.handler", {"STAGE": "another"}, folder)
        assert not process.serves("index.handler", {"STAGE": "test"}, tmp_path / "deployed-later")
    lines = (tmp_path / "guard.log").read_text().splitlines()
    assert lines.count("a line for the log") == 3
    assert "Traceback (most recent call last):" in lines


def test_a_timeout_ends_it(tmp_path: Path) -> None:
    with function(tmp_path, CODE) as process:
        assert process.invoke({"sleeps": True}, 1) == (None, "Task timed out after 1 seconds")
        assert not process.serves("index.handler", {"STAGE": "test"}, tmp_path / "guard")


def test_code_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    with function(tmp_path, "import nothing_of_the_kind") as process:
        answer, error = process.invoke({}, 10)
        assert answer is None
        assert error is not None
        assert error.endswith("No module named 'nothing_of_the_kind'")
        assert not process.serves("index.handler", {"STAGE": "test"}, tmp_path / "guard")


def packed(code: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("index.py", code)
    return content.getvalue()


def deployed(aws: EmbeddedAws, name: str, code: str, **target: str) -> None:
    """A function, and a rule of its name that calls it for events of a source of its name."""
    service = {"Service": "lambda.amazonaws.com"}
    allowed = {"Effect": "Allow", "Principal": service, "Action": "sts:AssumeRole"}
    trust = {"Version": "2012-10-17", "Statement": [allowed]}
    role = aws.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
    function = aws.client("lambda").create_function(
        FunctionName=name, Runtime="python3.13", Handler="index.handler", Timeout=10,
        Role=role["Role"]["Arn"], Code={"ZipFile": packed(code)},
    )  # fmt: skip
    aws.client("lambda").add_permission(
        FunctionName=name, StatementId="rules", Action="lambda:InvokeFunction",
        Principal="events.amazonaws.com",
    )  # fmt: skip
    pattern = json.dumps({"source": [name]})
    aws.client("events").put_rule(Name=name, EventPattern=pattern, State="ENABLED")
    targets: Any = [{"Id": "1", "Arn": function["FunctionArn"], **target}]
    aws.client("events").put_targets(Rule=name, Targets=targets)


def test_an_event_that_fails_is_tried_again_as_lambda_does(
    aws: EmbeddedAws, tmp_path: Path
) -> None:
    code = "calls = 0\ndef handler(event, context):\n    global calls\n    calls += 1\n"
    deployed(aws, "busy", code + "    return 6 / (calls - event['detail']['fails'] - 1)")
    bus = EventBus(aws=aws, code_folder=tmp_path)
    for fails in (0, 0, "always"):
        bus.publish("busy", "Test", {"fails": fails})
    bus.close()
    first, second, third = bus.invocations
    assert (first.tries, first.error) == (2, None)
    assert (second.tries, second.answer) == (1, 3.0)
    assert (third.tries, third.answer) == (EventBus.TRIES, None)
    assert third.error == "TypeError: unsupported operand type(s) for -: 'int' and 'str'"


def test_the_code_of_a_later_deploy_serves_the_events_after_it(
    aws: EmbeddedAws, tmp_path: Path
) -> None:
    deployed(aws, "changing", "def handler(event, context):\n    return 'old'")
    bus = EventBus(aws=aws, code_folder=tmp_path)
    bus.publish("changing", "Test", {})
    while not bus.is_idle:
        time.sleep(0.05)
    code = packed("def handler(event, context):\n    return 'new'")
    aws.client("lambda").update_function_code(FunctionName="changing", ZipFile=code)
    bus.publish("changing", "Test", {})
    bus.close()
    assert [each.answer for each in bus.invocations] == ["old", "new"]


def test_a_target_s_input_replaces_the_event(aws: EmbeddedAws, tmp_path: Path) -> None:
    code = "def handler(event, context):\n    return event"
    deployed(aws, "given", code, Input='{"only": "this"}')
    bus = EventBus(aws=aws, code_folder=tmp_path)
    bus.publish("given", "Test", {})
    bus.close()
    (told,) = bus.invocations
    assert told.answer == {"only": "this"}


def test_every_rule_of_many_stacks_is_heard(aws: EmbeddedAws, tmp_path: Path) -> None:
    topic = aws.client("sns").create_topic(Name="heard")["TopicArn"]
    sqs = aws.client("sqs")
    queue = sqs.create_queue(QueueName="heard")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]
    aws.client("sns").subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn["QueueArn"])
    allowed = {"Effect": "Allow", "Principal": {"Service": "events.amazonaws.com"},
               "Action": "sns:Publish", "Resource": topic}  # fmt: skip
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    aws.client("sns").set_topic_attributes(
        TopicArn=topic, AttributeName="Policy", AttributeValue=policy
    )
    events, pattern = aws.client("events"), json.dumps({"source": ["many"]})
    for number in range(102):  # ListRules returns at most 100 at once
        events.put_rule(Name=f"rule-{number}", EventPattern=pattern, State="ENABLED")
        events.put_targets(Rule=f"rule-{number}", Targets=[{"Id": "1", "Arn": topic}])
    bus = EventBus(aws=aws, code_folder=tmp_path)
    bus.publish("many", "Test", {})
    bus.close()
    queued = sqs.get_queue_attributes(
        QueueUrl=queue, AttributeNames=["ApproximateNumberOfMessages"]
    )
    assert queued["Attributes"]["ApproximateNumberOfMessages"] == "102"
