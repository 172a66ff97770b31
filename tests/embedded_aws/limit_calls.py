"""Calls that meet a limit: each takes what the limit is about, and makes all else that it needs."""

import base64
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

Client = Callable[[str], Any]


def new() -> str:
    return f"n{uuid.uuid4().hex[:12]}"


def numbered(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def text_of(size: int) -> str:
    """A text of this many bytes in UTF-8, and fewer characters."""
    return "é" * (size // 2) + "x" * (size % 2)


# Batch


def environment(c: Client, name: str = "") -> str:
    limits = [{"maxCapacity": 1, "capacityUnit": "NUM_INSTANCES"}]
    made = c("batch").create_service_environment(
        serviceEnvironmentName=name or new(),
        serviceEnvironmentType="SAGEMAKER_TRAINING",
        capacityLimits=limits,
    )
    return str(made["serviceEnvironmentArn"])


def queue(c: Client, name: str = "", **more: Any) -> str:
    made = c("batch").create_job_queue(
        jobQueueName=name or new(),
        jobQueueType="SAGEMAKER_TRAINING",
        priority=1,
        serviceEnvironmentOrder=[{"order": 1, "serviceEnvironment": environment(c)}],
        **more,
    )
    return str(made["jobQueueArn"])


def policy(c: Client, name: str = "", **more: Any) -> str:
    made = c("batch").create_scheduling_policy(
        name=name or new(), fairsharePolicy={"shareDecaySeconds": 60, **more}
    )
    return str(made["arn"])


def time_limit(c: Client, seconds: int) -> None:
    limit = {"reason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY", "state": "RUNNABLE"}
    queue(c, jobStateTimeLimitActions=[{**limit, "maxTimeSeconds": seconds, "action": "TERMINATE"}])


def give_policy(c: Client, has_policy: bool) -> None:
    which = queue(c, **({"schedulingPolicyArn": policy(c)} if has_policy else {}))
    c("batch").update_job_queue(jobQueue=which, schedulingPolicyArn=policy(c))


def take_policy(c: Client, has_policy: bool) -> None:
    which = queue(c, **({"schedulingPolicyArn": policy(c)} if has_policy else {}))
    c("batch").update_job_queue(jobQueue=which, schedulingPolicyArn="")


def delete_policy(c: Client, is_used: bool) -> None:
    which = policy(c)
    used_by = queue(c, schedulingPolicyArn=which) if is_used else ""
    try:
        c("batch").delete_scheduling_policy(arn=which)
    finally:
        if used_by:
            c("batch").update_job_queue(jobQueue=used_by, state="DISABLED")
            c("batch").delete_job_queue(jobQueue=used_by)


def shares(c: Client, weight: float, count: int = 1) -> None:
    policy(
        c,
        shareDistribution=[
            {"shareIdentifier": name, "weightFactor": weight} for name in numbered(count)
        ],
    )


TRAINING = {
    "RoleArn": "arn:aws:iam::123456789012:role/r",
    "AlgorithmSpecification": {"TrainingImage": "i", "TrainingInputMode": "File"},
    "OutputDataConfig": {"S3OutputPath": "s3://b/o"},
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 1},
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
}


def submit(c: Client, **more: Any) -> None:
    # It asks for more instances than the environment has, so that nothing starts.
    c("batch").submit_service_job(
        **{
            "jobName": new(),
            "jobQueue": queue(c),
            "serviceJobType": "SAGEMAKER_TRAINING",
            "serviceRequestPayload": json.dumps({"TrainingJobName": "t", **TRAINING}),
            **more,
        }
    )


# CloudFormation

TOPIC = {"Type": "AWS::SNS::Topic"}


def stack(c: Client, name: str = "", text: str = "", **sections: Any) -> None:
    body = {"Resources": {"T": {**TOPIC, "Condition": "No"}}, "Conditions": NO, **sections}
    text = text or json.dumps(body)
    values = dict.fromkeys(sections.get("Parameters", {}), "a")
    where: dict[str, Any] = {"TemplateBody": text}
    if len(text) > 50_000:
        bucket = made_bucket(c)
        c("s3").put_object(Bucket=bucket, Key="t.json", Body=text)
        where = {"TemplateURL": f"https://{bucket}.s3.amazonaws.com/t.json"}
    c("cloudformation").create_stack(
        StackName=name or new(),
        Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in values.items()],
        **where,
    )


NO = {"No": {"Fn::Equals": ["a", "b"]}}


def padded(size: int) -> str:
    """A template of this many bytes."""
    body = {
        "Resources": {"T": {**TOPIC, "Condition": "No"}},
        "Conditions": NO,
        "Metadata": {"a": ""},
    }
    text = json.dumps(body)
    return text.replace('"a": ""', f'"a": "{"x" * (size - len(text))}"')


def template_body(c: Client, size: int) -> None:
    c("cloudformation").create_stack(StackName=new(), TemplateBody=padded(size))


def parameter_value(c: Client, size: int) -> None:
    body = {
        "Parameters": {"P": {"Type": "String"}},
        "Resources": {"T": {**TOPIC, "Condition": "No"}},
        "Conditions": NO,
    }
    c("cloudformation").create_stack(
        StackName=new(),
        TemplateBody=json.dumps(body),
        Parameters=[{"ParameterKey": "P", "ParameterValue": "x" * size}],
    )


def resources(names: list[str]) -> dict[str, Any]:
    return {"Resources": {name: {**TOPIC, "Condition": "No"} for name in names}}


# CloudWatch


def alarm(c: Client, **more: Any) -> None:
    c("cloudwatch").put_metric_alarm(
        **{
            "AlarmName": new(),
            "Namespace": "n",
            "MetricName": "m",
            "Statistic": "Average",
            "Period": 60,
            "EvaluationPeriods": 1,
            "Threshold": 1.0,
            "ComparisonOperator": "LessThanThreshold",
            **more,
        }
    )


def math_alarm(c: Client, *queries: Any, **more: Any) -> None:
    c("cloudwatch").put_metric_alarm(
        AlarmName=new(),
        EvaluationPeriods=1,
        Threshold=1.0,
        ComparisonOperator="LessThanThreshold",
        Metrics=[*queries],
        **more,
    )


def query(name: str, *, period: int = 60, returns: bool = False) -> dict[str, Any]:
    stat = {
        "Metric": {"Namespace": "n", "MetricName": "m"},
        "Period": period,
        "Stat": "Average",
    }
    return {"Id": name, "MetricStat": stat, "ReturnData": returns}


def expression(text: str, *, name: str = "e", returns: bool = True) -> dict[str, Any]:
    return {"Id": name, "Expression": text, "ReturnData": returns}


def datum(c: Client, **more: Any) -> None:
    c("cloudwatch").put_metric_data(Namespace="n", MetricData=[{"MetricName": "m", **more}])


def dashboard(c: Client, *metrics: int, name: str = "") -> None:
    widgets = [
        {"type": "metric", "properties": {"metrics": [["n", "m"]] * count}} for count in metrics
    ]
    body = json.dumps({"widgets": widgets})
    c("cloudwatch").put_dashboard(DashboardName=name or new(), DashboardBody=body)


# EC2


DEEP_LEARNING_AMI = (
    "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04"
    "/latest/ami-id"
)


def encoded(size: int) -> str:
    return base64.b64encode(b"x" * size).decode()


def template(c: Client, name: str = "", **data: Any) -> str:
    data = {"InstanceType": "g5.xlarge", "ImageId": image(c), **data}
    made = c("ec2").create_launch_template(
        LaunchTemplateName=name or new(), LaunchTemplateData=data
    )
    return str(made["LaunchTemplate"]["LaunchTemplateId"])


def image(c: Client) -> str:
    found = c("ssm").get_parameter(Name=DEEP_LEARNING_AMI)
    return str(found["Parameter"]["Value"])


def run(c: Client, **more: Any) -> None:
    c("ec2").run_instances(
        ImageId=image(c), InstanceType="g5.xlarge", MinCount=1, MaxCount=1, **more
    )


def volume(c: Client, **more: Any) -> None:
    given = {"Size": 200, **more}
    c("ec2").create_volume(AvailabilityZone="us-east-1a", VolumeType="gp3", **given)


def versions(c: Client, count: int) -> None:
    # Ten thousand calls would take minutes; the template is given their number.
    from moto.ec2.models import ec2_backends

    which = template(c)
    made = ec2_backends["123456789012"]["us-east-1"].launch_templates[which]
    made.versions[-1].number = count - 1
    c("ec2").create_launch_template_version(
        LaunchTemplateId=which, LaunchTemplateData={"InstanceType": "g5.xlarge"}
    )


def groups(c: Client, count: int) -> None:
    ec2 = c("ec2")
    made = [ec2.create_security_group(GroupName=new(), Description="d") for _ in range(count)]
    run(c, SecurityGroupIds=[each["GroupId"] for each in made])


def tagged(c: Client, *tags: tuple[str, str]) -> None:
    pairs = [{"Key": key, "Value": value} for key, value in tags]
    c("ec2").create_security_group(
        GroupName=new(),
        Description="d",
        TagSpecifications=[{"ResourceType": "security-group", "Tags": pairs}],
    )


def template_tags(c: Client, count: int) -> None:
    tags = [{"Key": name, "Value": "v"} for name in numbered(count)]
    template(c, TagSpecifications=[{"ResourceType": "instance", "Tags": tags}])


def metadata_tag(c: Client, key: str) -> None:
    run(
        c,
        MetadataOptions={"InstanceMetadataTags": "enabled"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": key, "Value": "v"}]}],
    )


def group(c: Client, name: str = "", description: str = "d") -> str:
    made = c("ec2").create_security_group(GroupName=name or new(), Description=description)
    return str(made["GroupId"])


def rule(c: Client, description: str) -> None:
    address = {"CidrIp": "10.0.0.0/8", "Description": description}
    permission = {"IpProtocol": "tcp", "FromPort": 1, "ToPort": 1, "IpRanges": [address]}
    c("ec2").authorize_security_group_ingress(GroupId=group(c), IpPermissions=[permission])


def subnets(c: Client, *zones: str) -> tuple[str, list[str]]:
    ec2 = c("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    made = [
        ec2.create_subnet(
            VpcId=vpc, CidrBlock=f"10.0.{number}.0/24", AvailabilityZone=f"us-east-1{zone}"
        )
        for number, zone in enumerate(zones)
    ]
    return vpc, [each["Subnet"]["SubnetId"] for each in made]


def endpoint(c: Client, zones: str) -> None:
    """The first subnet at creation, the second added."""
    vpc, made = subnets(c, *zones)
    c("ec2").modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
    where = {"ServiceName": "com.amazonaws.us-east-1.ssm", "VpcEndpointType": "Interface"}
    found = c("ec2").create_vpc_endpoint(VpcId=vpc, SubnetIds=made[:1], **where)
    which = found["VpcEndpoint"]["VpcEndpointId"]
    c("ec2").modify_vpc_endpoint(VpcEndpointId=which, AddSubnetIds=made[1:])


def scaling_group(c: Client, name: str) -> None:
    specification = {"LaunchTemplateId": template(c), "Version": "1"}
    c("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=name,
        MinSize=0,
        MaxSize=0,
        VPCZoneIdentifier=subnets(c, "a")[1][0],
        MixedInstancesPolicy={"LaunchTemplate": {"LaunchTemplateSpecification": specification}},
    )


def fleet(c: Client, *overrides: Any, **more: Any) -> None:
    specification = {"LaunchTemplateId": template(c), "Version": "1"}
    config = {"LaunchTemplateSpecification": specification, "Overrides": [*overrides]}
    c("ec2").request_spot_fleet(
        SpotFleetRequestConfig={
            "IamFleetRole": "arn:aws:iam::123456789012:role/none",
            "TargetCapacity": 0,
            "LaunchTemplateConfigs": [config],
            **more,
        }
    )


def pools(c: Client, count: int) -> None:
    every = [{"InstanceType": name, "AvailabilityZone": "us-east-1a"} for name in numbered(count)]
    fleet(c, *every, *every[:10])


def rebalance(c: Client, seconds: int) -> None:
    strategy = {"ReplacementStrategy": "launch-before-terminate", "TerminationDelay": seconds}
    fleet(c, SpotMaintenanceStrategies={"CapacityRebalance": strategy})


# EventBridge


def put_rule(c: Client, name: str = "", **more: Any) -> str:
    name = name or new()
    c("events").put_rule(Name=name, **more)
    return name


def targets(c: Client, count: int) -> None:
    """All but one in the first call."""
    name = put_rule(c, ScheduleExpression="rate(1 hour)")
    every = [{"Id": n, "Arn": f"arn:aws:sns:us-east-1:123456789012:{n}"} for n in numbered(count)]
    for some in (every[:-1], every[-1:]):
        c("events").put_targets(Rule=name, Targets=some)


def target(c: Client, given: dict[str, str]) -> None:
    where = {"Id": "t", "Arn": "arn:aws:sns:us-east-1:123456789012:t", **given}
    name = put_rule(c, ScheduleExpression="rate(1 hour)")
    c("events").put_targets(Rule=name, Targets=[where])


def event(c: Client, size: int) -> None:
    # Source, DetailType and the rest of Detail are 12 bytes.
    detail = json.dumps({"a": "x" * (size - 12)})
    bus = new()
    c("events").create_event_bus(Name=bus)
    entry = {"Source": "s", "DetailType": "ty", "Detail": detail, "EventBusName": bus}
    c("events").put_events(Entries=[entry])


# IAM


def document(characters: int, *, trust: bool = False) -> str:
    statement: dict[str, Any] = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}
    if trust:
        who = {"Service": "ec2.amazonaws.com"}
        statement = {"Effect": "Allow", "Principal": who, "Action": "sts:AssumeRole"}
    text = json.dumps({"Version": "2012-10-17", "Statement": [{"Sid": "", **statement}]})
    missing = characters - len(text.replace(" ", ""))
    return text.replace('"Sid": ""', f'"Sid": "{"a" * missing}"')


def role(c: Client, size: int = 200) -> str:
    name = new()
    c("iam").create_role(RoleName=name, AssumeRolePolicyDocument=document(size, trust=True))
    return name


def inline(c: Client, size: int) -> None:
    """Half in an earlier policy."""
    name = role(c)
    for policy_name, part in (("a", size // 2), ("b", size - size // 2)):
        c("iam").put_role_policy(
            RoleName=name, PolicyName=policy_name, PolicyDocument=document(part)
        )


def attached(c: Client, count: int) -> None:
    name = role(c)
    for _ in range(count):
        made = c("iam").create_policy(PolicyName=new(), PolicyDocument=document(200))
        c("iam").attach_role_policy(RoleName=name, PolicyArn=made["Policy"]["Arn"])


# Lambda


def function(c: Client, **more: Any) -> str:
    name = new()
    c("lambda").create_function(
        **{
            "FunctionName": name,
            "Runtime": "python3.12",
            "Handler": "a.b",
            "Role": f"arn:aws:iam::123456789012:role/{role(c)}",
            "Code": {"ZipFile": b"x"},
            **more,
        }
    )
    return name


def variables(c: Client, size: int) -> None:
    # {"A":"..."} has 8 characters of its own.
    function(c, Environment={"Variables": {"AB": "x" * (size - 9)}})


def invoke(c: Client, size: int) -> None:
    payload = json.dumps("x" * (size - 2))
    c("lambda").invoke(FunctionName=function(c), InvocationType="Event", Payload=payload)


def permissions(c: Client, count: int) -> None:
    name = function(c)
    for each in numbered(count):
        c("lambda").add_permission(
            FunctionName=name,
            StatementId=each,
            Action="lambda:InvokeFunction",
            Principal="events.amazonaws.com",
            SourceArn=f"arn:aws:events:us-east-1:123456789012:rule/{'x' * 64}",
        )


# Logs


def log_group(c: Client, name: str = "") -> str:
    name = name or new()
    c("logs").create_log_group(logGroupName=name)
    return name


def retention(c: Client, days: int) -> None:
    c("logs").put_retention_policy(logGroupName=log_group(c), retentionInDays=days)


def events(c: Client, *ages_ms: int, message: str = "m") -> None:
    where = {"logGroupName": log_group(c), "logStreamName": "s"}
    c("logs").create_log_stream(**where)
    now = round(time.time() * 1000)
    lines = [{"timestamp": now - age, "message": message} for age in ages_ms]
    c("logs").put_log_events(**where, logEvents=lines)


# S3


def made_bucket(c: Client) -> str:
    name = new()
    c("s3").create_bucket(Bucket=name)
    return name


def put(c: Client, key: str = "k", **more: Any) -> dict[str, str]:
    where = {"Bucket": made_bucket(c), "Key": key}
    c("s3").put_object(**where, Body=b"b", **more)
    return where


def parts(c: Client, numbers: list[int]) -> None:
    where = {"Bucket": made_bucket(c), "Key": "k"}
    upload = {**where, "UploadId": c("s3").create_multipart_upload(**where)["UploadId"]}
    made = {}
    for number in sorted(numbers):
        body = b"x" * (5 * 2**20)
        made[number] = c("s3").upload_part(**upload, PartNumber=number, Body=body)["ETag"]
    c("s3").complete_multipart_upload(
        **upload,
        MultipartUpload={"Parts": [{"PartNumber": n, "ETag": made[n]} for n in numbers]},
    )


def delete(c: Client, count: int) -> None:
    keys = [{"Key": name} for name in numbered(count)]
    c("s3").delete_objects(Bucket=made_bucket(c), Delete={"Objects": keys})


def tag_set(count: int) -> dict[str, Any]:
    return {"Tagging": {"TagSet": [{"Key": name, "Value": "v"} for name in numbered(count)]}}


def lifecycle(c: Client, **given: Any) -> None:
    rules = [{"ID": "r", "Status": "Enabled", "Filter": {"Prefix": ""}, **given}]
    c("s3").put_bucket_lifecycle_configuration(
        Bucket=made_bucket(c), LifecycleConfiguration={"Rules": rules}
    )


EXPIRES = {"Expiration": {"Days": 1}}

# SNS and SSM


def topic(c: Client, **more: Any) -> str:
    return str(c("sns").create_topic(Name=new(), **more)["TopicArn"])


def parameter(c: Client, name: str = "", value: str = "v", **more: Any) -> str:
    name = name or f"/{new()}"
    c("ssm").put_parameter(Name=name, Value=value, Type="String", **more)
    return name


def downgrade(c: Client, tier: str) -> None:
    name = parameter(c, Tier="Advanced")
    c("ssm").put_parameter(Name=name, Value="w", Type="String", Tier=tier, Overwrite=True)
