"""For each resource type: a stack with one of it, and a change that needs no replacement."""

from typing import Any

TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": ["ec2.amazonaws.com", "spotfleet.amazonaws.com"]},
            "Action": "sts:AssumeRole",
        }
    ],
}


def policy(resource: Any = "*", action: str = "s3:GetObject") -> dict[str, Any]:
    statement = {"Effect": "Allow", "Action": action, "Resource": resource}
    return {"Version": "2012-10-17", "Statement": [statement]}


def tags(**pairs: str) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in pairs.items()]


def of(type_: str, **properties: Any) -> dict[str, Any]:
    return {"Type": f"AWS::{type_}", "Properties": properties}


def ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def attribute(name: str, key: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [name, key]}


def group(**properties: Any) -> dict[str, Any]:
    return of("Logs::LogGroup", **properties)


def parameter(value: Any = "1", **more: Any) -> dict[str, Any]:
    return of("SSM::Parameter", Type="String", Value=value, **more)


TOPIC = of("SNS::Topic")
ROLE = of("IAM::Role", AssumeRolePolicyDocument=TRUST)
STARTS = [{"PolicyName": "Starts", "PolicyDocument": policy(action="ec2:*")}]
FLEET_ROLE = of("IAM::Role", AssumeRolePolicyDocument=TRUST, Policies=STARTS)
VPC = of("EC2::VPC", CidrBlock="10.0.0.0/16")
SUBNET = of("EC2::Subnet", VpcId=ref("Vpc"), CidrBlock="10.0.0.0/24")
TABLE = of("EC2::RouteTable", VpcId=ref("Vpc"))
GATEWAY = of("EC2::InternetGateway")
GROUP = of("EC2::SecurityGroup", GroupDescription="d", VpcId=ref("Vpc"))
ATTACHED = of("EC2::VPCGatewayAttachment", VpcId=ref("Vpc"), InternetGatewayId=ref("Gateway"))
RULE = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "CidrIp": "0.0.0.0/0"}
FUNCTION = of(
    "Lambda::Function",
    Code={"ZipFile": "def handler(event, context): return 1"},
    Handler="index.handler",
    Runtime="python3.12",
    Role=attribute("Role", "Arn"),
)
ALARM = of(
    "CloudWatch::Alarm",
    ComparisonOperator="LessThanThreshold",
    EvaluationPeriods=1,
    MetricName="Utilization",
    Namespace="Training",
    Period=60,
    Statistic="Average",
    Threshold=5,
)


def template(name: str = "lt", **data: Any) -> dict[str, Any]:
    return of("EC2::LaunchTemplate", LaunchTemplateData={"InstanceType": "g5.xlarge"} | data)


def changed(resource: dict[str, Any], **properties: Any) -> dict[str, Any]:
    return {**resource, "Properties": {**resource["Properties"], **properties}}


# type: (the resources of a stack with `It` of that type, what changes of `It` in place)
_ENVIRONMENT = of(
    "Batch::ServiceEnvironment",
    ServiceEnvironmentType="SAGEMAKER_TRAINING",
    CapacityLimits=[{"CapacityUnit": "NUM_INSTANCES", "MaxCapacity": 1}],
)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AWS::AutoScaling::AutoScalingGroup": (
        {
            "Vpc": VPC,
            "Subnet": SUBNET,
            "Template": template(),
            "It": of(
                "AutoScaling::AutoScalingGroup",
                AutoScalingGroupName="Training-run-1",
                MinSize="0",
                MaxSize="2",
                DesiredCapacity="1",
                VPCZoneIdentifier=[ref("Subnet")],
                MixedInstancesPolicy={
                    "LaunchTemplate": {
                        "LaunchTemplateSpecification": {
                            "LaunchTemplateId": ref("Template"),
                            "Version": attribute("Template", "LatestVersionNumber"),
                        },
                        "Overrides": [{"InstanceType": "g5.xlarge"}],
                    },
                    "InstancesDistribution": {"OnDemandPercentageAboveBaseCapacity": 0},
                },
                MetricsCollection=[{"Granularity": "1Minute", "Metrics": ["GroupDesiredCapacity"]}],
                Tags=[{"Key": "a", "Value": "1", "PropagateAtLaunch": True}],
            ),
        },
        {"Tags": [{"Key": "b", "Value": "2", "PropagateAtLaunch": True}]},
    ),
    "AWS::Batch::JobQueue": (
        {
            "Environment": _ENVIRONMENT,
            "It": of(
                "Batch::JobQueue",
                JobQueueType="SAGEMAKER_TRAINING",
                Priority=1,
                ServiceEnvironmentOrder=[{"Order": 1, "ServiceEnvironment": ref("Environment")}],
            ),
        },
        {"Priority": 2},
    ),
    "AWS::Batch::SchedulingPolicy": (
        {"It": of("Batch::SchedulingPolicy", FairsharePolicy={"ShareDecaySeconds": 600})},
        {"FairsharePolicy": {"ShareDecaySeconds": 700}},
    ),
    "AWS::Batch::ServiceEnvironment": (
        {"It": _ENVIRONMENT},
        {"CapacityLimits": [{"CapacityUnit": "NUM_INSTANCES", "MaxCapacity": 2}]},
    ),
    "AWS::CDK::Metadata": ({"It": of("CDK::Metadata", Analytics="v2")}, {"Analytics": "v3"}),
    "AWS::CloudWatch::Alarm": ({"It": ALARM}, {"Threshold": 6}),
    "AWS::CloudWatch::Dashboard": (
        {"It": of("CloudWatch::Dashboard", DashboardBody='{"widgets": []}')},
        {"DashboardBody": '{"widgets": [], "start": "-PT3H"}'},
    ),
    "AWS::EC2::FlowLog": (
        {
            "Vpc": VPC,
            "Log": of("Logs::LogGroup"),
            "Role": ROLE,
            "It": of(
                "EC2::FlowLog",
                ResourceId=ref("Vpc"),
                ResourceType="VPC",
                TrafficType="ALL",
                LogGroupName=ref("Log"),
                DeliverLogsPermissionArn=attribute("Role", "Arn"),
            ),
        },
        {"Tags": tags(a="b")},
    ),
    "AWS::EC2::EIP": ({"It": of("EC2::EIP", Domain="vpc")}, {}),
    "AWS::EC2::InternetGateway": ({"It": GATEWAY}, {"Tags": tags(a="b")}),
    "AWS::EC2::LaunchTemplate": (
        {"It": template()},
        {"LaunchTemplateData": {"InstanceType": "g5.2xlarge"}},
    ),
    "AWS::EC2::NatGateway": (
        {
            "Vpc": VPC,
            "Subnet": SUBNET,
            "Address": of("EC2::EIP"),
            "It": of(
                "EC2::NatGateway",
                SubnetId=ref("Subnet"),
                AllocationId=attribute("Address", "AllocationId"),
            ),
        },
        {"Tags": tags(a="b")},
    ),
    "AWS::EC2::Route": (
        {
            "Vpc": VPC,
            "Gateway": GATEWAY,
            "Attached": ATTACHED,
            "Table": TABLE,
            "It": {
                **of(
                    "EC2::Route",
                    RouteTableId=ref("Table"),
                    DestinationCidrBlock="0.0.0.0/0",
                    GatewayId=ref("Gateway"),
                ),
                "DependsOn": "Attached",
            },
        },
        {},
    ),
    "AWS::EC2::RouteTable": ({"Vpc": VPC, "It": TABLE}, {"Tags": tags(a="b")}),
    "AWS::EC2::SecurityGroup": (
        {"Vpc": VPC, "It": changed(GROUP, SecurityGroupEgress=[RULE])},
        {"SecurityGroupIngress": [{**RULE, "FromPort": 80, "ToPort": 80}]},
    ),
    "AWS::EC2::SpotFleet": (
        {
            "Role": FLEET_ROLE,
            "Template": template(),
            "It": of(
                "EC2::SpotFleet",
                SpotFleetRequestConfigData={
                    "IamFleetRole": attribute("Role", "Arn"),
                    "TargetCapacity": 1,
                    "LaunchTemplateConfigs": [
                        {
                            "LaunchTemplateSpecification": {
                                "LaunchTemplateId": ref("Template"),
                                "Version": attribute("Template", "LatestVersionNumber"),
                            }
                        }
                    ],
                },
            ),
        },
        {},
    ),
    "AWS::EC2::Subnet": ({"Vpc": VPC, "It": SUBNET}, {"MapPublicIpOnLaunch": True}),
    "AWS::EC2::SubnetRouteTableAssociation": (
        {
            "Vpc": VPC,
            "Subnet": SUBNET,
            "Table": TABLE,
            "It": of(
                "EC2::SubnetRouteTableAssociation",
                SubnetId=ref("Subnet"),
                RouteTableId=ref("Table"),
            ),
        },
        {},
    ),
    "AWS::EC2::VPC": ({"It": VPC}, {"EnableDnsHostnames": True}),
    "AWS::EC2::VPCEndpoint": (
        {
            "Vpc": VPC,
            "Table": TABLE,
            "It": of(
                "EC2::VPCEndpoint",
                VpcId=ref("Vpc"),
                ServiceName={"Fn::Sub": "com.amazonaws.${AWS::Region}.s3"},
                VpcEndpointType="Gateway",
            ),
        },
        {"RouteTableIds": [ref("Table")]},
    ),
    "AWS::EC2::VPCGatewayAttachment": ({"Vpc": VPC, "Gateway": GATEWAY, "It": ATTACHED}, {}),
    "AWS::ECR::Repository": ({"It": of("ECR::Repository")}, {"ImageTagMutability": "IMMUTABLE"}),
    "AWS::Events::Rule": (
        {
            "Topic": of("SNS::Topic"),
            "It": of(
                "Events::Rule",
                EventPattern={"source": ["aws.ec2spotfleet"]},
                Targets=[{"Arn": ref("Topic"), "Id": "One"}],
            ),
        },
        {"Targets": [{"Arn": ref("Topic"), "Id": "Two"}], "State": "DISABLED"},
    ),
    "AWS::IAM::InstanceProfile": (
        {"Role": ROLE, "It": of("IAM::InstanceProfile", Roles=[ref("Role")])},
        {},
    ),
    "AWS::IAM::ManagedPolicy": (
        {"Role": ROLE, "It": of("IAM::ManagedPolicy", PolicyDocument=policy())},
        {"Roles": [ref("Role")], "PolicyDocument": policy(action="s3:PutObject")},
    ),
    "AWS::IAM::Policy": (
        {
            "Role": ROLE,
            "It": of("IAM::Policy", PolicyName="p", PolicyDocument=policy(), Roles=[ref("Role")]),
        },
        {"PolicyName": "q", "PolicyDocument": policy(action="s3:PutObject")},
    ),
    "AWS::IAM::Role": (
        {
            "It": of(
                "IAM::Role",
                AssumeRolePolicyDocument=TRUST,
                ManagedPolicyArns=["arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"],
                Policies=[{"PolicyName": "p", "PolicyDocument": policy()}],
            )
        },
        {"ManagedPolicyArns": [], "Policies": [], "Description": "changed"},
    ),
    "AWS::KMS::Alias": (
        {
            "Key": of("KMS::Key"),
            "It": of("KMS::Alias", AliasName="alias/it", TargetKeyId=ref("Key")),
        },
        {},
    ),
    "AWS::KMS::Key": ({"It": of("KMS::Key")}, {"EnableKeyRotation": True}),
    "AWS::Lambda::Function": (
        {"Role": ROLE, "It": FUNCTION},
        {"Timeout": 60, "Environment": {"Variables": {"HOURS": 72}}},
    ),
    "AWS::Lambda::Permission": (
        {
            "Role": ROLE,
            "Function": FUNCTION,
            "It": of(
                "Lambda::Permission",
                Action="lambda:InvokeFunction",
                FunctionName=attribute("Function", "Arn"),
                Principal="events.amazonaws.com",
            ),
        },
        {},
    ),
    "AWS::Logs::LogGroup": ({"It": of("Logs::LogGroup")}, {"RetentionInDays": 7}),
    "AWS::S3::Bucket": (
        {
            "It": of(
                "S3::Bucket",
                LifecycleConfiguration={
                    "Rules": [
                        {
                            "Status": "Enabled",
                            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
                            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
                        }
                    ]
                },
            )
        },
        {"VersioningConfiguration": {"Status": "Enabled"}, "Tags": tags(a="b")},
    ),
    "AWS::S3::BucketPolicy": (
        {
            "Bucket": of("S3::Bucket"),
            "It": of("S3::BucketPolicy", Bucket=ref("Bucket"), PolicyDocument=policy()),
        },
        {"PolicyDocument": policy(action="s3:PutObject")},
    ),
    "AWS::SNS::Subscription": (
        {
            "Topic": of("SNS::Topic"),
            "It": of(
                "SNS::Subscription", TopicArn=ref("Topic"), Protocol="email", Endpoint="a@b.org"
            ),
        },
        {},
    ),
    "AWS::SNS::Topic": ({"It": of("SNS::Topic")}, {"DisplayName": "changed"}),
    "AWS::SNS::TopicPolicy": (
        {
            "Topic": of("SNS::Topic"),
            "It": of(
                "SNS::TopicPolicy",
                Topics=[ref("Topic")],
                PolicyDocument=policy(ref("Topic"), "sns:Publish"),
            ),
        },
        {"PolicyDocument": policy(ref("Topic"), "sns:Subscribe")},
    ),
    "AWS::SSM::Parameter": (
        {"It": of("SSM::Parameter", Type="String", Value="1")},
        {"Value": "2", "Tags": {"a": "b"}},
    ),
}
