"""The stacks of others: the doctor and `make deploy` refuse them, and find ours of other names."""

from types import SimpleNamespace

import pytest
from botocore.stub import Stubber

from stacks.doctor.__main__ import main
from tests.stack_names import named
from tests.stacks.doctor.conftest import Clinic, Examine, deployed, unconnected

THEIRS = "Networks of the payments team"


@pytest.mark.parametrize("stack", ["DatasetStack", "NetworkStack", "TrainingStack"])
def test_fails_for_a_stack_of_others_and_names_the_way_out(
    healthy: Clinic, examine: Examine, capsys: pytest.CaptureFixture[str], stack: str
) -> None:
    name = named(stack)
    adopted = ("run_bucket=my-runs",) if stack != "DatasetStack" else ()
    with deployed(healthy, stack, description=THEIRS):
        (line,) = examine(healthy, *adopted)[f"stack {name}"]
        assert line["state"] == "problem"
        assert line["what"].startswith(f"the stack {name} is not this project's")
        assert THEIRS in line["what"]
        assert line["fix"].endswith(" -c prefix=NAME-")
        # The options of the CLI are none of the check's.
        options = ("--require-approval", "never", "--context", "size=g5.xlarge", "--no-rollback")
        assert main(["--before", "deploy", *options], healthy.connect) == 1
        assert f"the stack {name} is not this project's" in capsys.readouterr().err
        # `cdk destroy` would delete the training stack alone.
        only = main(["--before", "destroy", *options], healthy.connect)
        assert only == int(stack == "TrainingStack")
        assert main(["--before", "deploy", "-c", "prefix=VisionTeam-"], healthy.connect) == 0


@pytest.mark.parametrize("prefix", ["", "VisionTeam-"])
def test_what_is_deployed_under_another_prefix_is_found(
    healthy: Clinic, examine: Examine, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    with deployed(healthy, "DatasetStack", prefix), deployed(healthy, prefix=prefix):
        for stack in ("DatasetStack", "TrainingStack"):
            (line,) = examine(healthy)[f"stack {named(stack)}"]
            assert line["state"] == "warning"
            assert f"not deployed; {prefix}{stack} is" in line["what"]
            assert f"-c prefix={prefix} " in line["fix"]
        assert main(["--before", "deploy"], healthy.connect) == 0
        assert "would build a second, empty one" in capsys.readouterr().err
        # The fix keeps it, and names no other team's stacks.
        found = examine(healthy, f"prefix={prefix}")
        assert found[f"stack {prefix}TrainingStack"][0]["what"] == "CREATE_COMPLETE"
        with deployed(healthy, "DatasetStack"):  # two teams, side by side
            (line,) = examine(healthy)[f"stack {named('TrainingStack')}"]
            assert (line["state"], line["what"]) == ("ok", "not deployed yet")


def test_fails_before_a_deploy_if_the_stacks_cannot_be_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = unconnected("cloudformation")
    with Stubber(client) as stub:
        stub.add_client_error("describe_stacks", "AccessDenied", "no", http_status_code=403)
        arn = "arn:aws:iam::123456789012:root"
        sts = SimpleNamespace(get_caller_identity=lambda: {"Arn": arn})
        clients = {"cloudformation": client, "sts": sts}
        assert main(["--before", "deploy"], lambda _: (clients.__getitem__, "us-east-1")) == 1
    said = capsys.readouterr().err
    assert "these credentials may not call cloudformation:DescribeStacks" in said


def test_a_deploy_that_ends_another_run_is_told_before_and_goes_on(
    healthy: Clinic, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one with `-c max_usd=80` alone does, whose run id is then the usual one."""
    with deployed(healthy, RunUri="s3://my-runs/runs/trajectory-1"):
        assert main(["--before", "deploy", "-c", "max_usd=80"], healthy.connect) == 0
        assert "the deploy starts run-1 and ends trajectory-1" in capsys.readouterr().err
        assert main(["--before", "destroy"], healthy.connect) == 0
        assert "trajectory-1" not in capsys.readouterr().err
