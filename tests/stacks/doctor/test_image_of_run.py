"""The doctor on the image of a run: the one a deploy starts, the one deployed and the newest."""

from stacks.parameters import StackParameters
from tests.stacks.doctor.conftest import Clinic, Examine, deployed

IMAGE = (
    "/aws/service/deeplearning/ami/x86_64/"
    "oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)


def test_an_image_that_is_not_the_deployed_run_s_is_a_warning_with_the_command_that_keeps_it(
    healthy: Clinic, examine: Examine
) -> None:
    (newest,) = healthy.aws.client("ssm").get_parameters(Names=[IMAGE])["Parameters"]
    run, old = "s3://my-runs/runs/run-1", "ami-0a1b2c3d4e5f60718"
    command = "npx cdk deploy TrainingStack -c dataset_bucket=my-data -c pytorch_ami_parameter="
    (line,) = examine(healthy)["image"]
    assert (line["state"], line["fix"]) == ("ok", "")
    # Deployed before a run kept its image, or with an id that this deploy does not name.
    with deployed(healthy, RunUri=run, Image=old):
        (line,) = examine(healthy)["image"]
        assert line["state"] == "warning"
        assert line["what"].startswith(newest["Value"])
        assert f"run-1 is on {old}: the deploy ends its machine" in line["what"]
        assert line["fix"].startswith(f"{command}{old} ")
        (line,) = examine(healthy, "run_id=run-2")["image"]
        assert (line["state"], line["fix"]) == ("ok", "")
        assert line["what"].endswith(f"TrainingStack has {old}")


def test_the_image_that_a_run_keeps_is_the_one_examined(healthy: Clinic, examine: Examine) -> None:
    newest = healthy.aws.client("ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"]
    kept = healthy.aws.client("ec2").register_image(Name="build of last month")["ImageId"]
    run = "s3://my-runs/runs/run-1"
    keeper = StackParameters.for_size("g5.xlarge").image_stack
    with deployed(healthy, keeper, Image=kept), deployed(healthy, RunUri=run, Image=kept):
        (line,) = examine(healthy)["image"]
        assert line["what"] == (
            f"{kept}: build of last month; run-1 keeps it, the newest is {newest}"
        )
        assert line["fix"].endswith(f" -c pytorch_ami_parameter={newest}   # takes the newest")
        gone = IMAGE.replace("2.12", "9.99")
        keeper = StackParameters.for_size("g5.xlarge", pytorch_ami_parameter=gone).image_stack
        with deployed(healthy, keeper, Image=kept):
            (line,) = examine(healthy, f"pytorch_ami_parameter={gone}")["image"]
        assert line["state"] == "ok", "a line that AWS no longer publishes"


def test_an_image_that_aws_has_withdrawn_is_a_problem_with_the_newest_as_the_way_out(
    healthy: Clinic, examine: Examine
) -> None:
    newest = healthy.aws.client("ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"]
    keeper = StackParameters.for_size("g5.xlarge").image_stack
    with deployed(healthy, keeper, Image="ami-0a1b2c3d4e5f60718"):
        (line,) = examine(healthy)["image"]
    assert line["state"] == "problem"
    assert line["what"] == "the image ami-0a1b2c3d4e5f60718 is not available in us-east-1"
    assert line["fix"].endswith(f" -c pytorch_ami_parameter={newest}")
