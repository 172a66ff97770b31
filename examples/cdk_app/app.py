"""Another team's CDK app: a training stack in its own network, with its own tags and account."""

from aws_cdk import App, Environment, Stack, Tags
from aws_cdk import aws_ec2 as ec2

from stacks import DatasetStack, StackParameters, TrainingStack

app = App()
env = Environment(account="111122223333", region="eu-west-1")
vpc = ec2.Vpc(Stack(app, "Platform", env=env), "Vpc", max_azs=2)

parameters = StackParameters.for_size(
    "g5.xlarge", region="eu-west-1", workload="imagenet", run_id="vision-1"
)
data = DatasetStack(app, "VisionData", parameters=parameters, env=env)
TrainingStack(
    app,
    "Vision",
    parameters=parameters,
    dataset_bucket_name=data.dataset_bucket_name,
    run_bucket_name=data.run_bucket_name,
    key_arn=data.key_arn,
    vpc_id=vpc.vpc_id,
    subnet_ids=[subnet.subnet_id for subnet in vpc.private_subnets],
    env=env,
)
Tags.of(app).add("team", "vision")
app.synth()
