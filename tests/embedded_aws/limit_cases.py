"""For each row of contract/aws_limits.toml: a call that meets it, a value that AWS takes, and one
that it refuses. A row with `most` alone needs no values: it takes that number and refuses the next.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.embedded_aws.limit_calls import (
    EXPIRES,
    Client,
    alarm,
    attached,
    dashboard,
    datum,
    delete,
    delete_policy,
    document,
    downgrade,
    encoded,
    endpoint,
    environment,
    event,
    events,
    expression,
    fleet,
    function,
    give_policy,
    group,
    groups,
    inline,
    invoke,
    lifecycle,
    log_group,
    made_bucket,
    math_alarm,
    metadata_tag,
    new,
    numbered,
    padded,
    parameter,
    parameter_value,
    parts,
    permissions,
    policy,
    pools,
    put,
    put_rule,
    query,
    queue,
    rebalance,
    resources,
    retention,
    role,
    rule,
    run,
    scaling_group,
    shares,
    stack,
    submit,
    subnets,
    tag_set,
    tagged,
    take_policy,
    target,
    targets,
    template,
    template_body,
    template_tags,
    text_of,
    time_limit,
    topic,
    variables,
    versions,
    volume,
)  # fmt: skip

# The call, what it takes, what it refuses.
Case = tuple[Callable[[Client, Any], Any], Any, Any]
NUMBER: Any = None  # the row's own number, and the one beyond it

CASES: dict[str, Case] = {
    "auto-scaling-group-name": (scaling_group, "a.b", "a:b"),
    "job-queue-name": (queue, "a-b_1", "a b"),
    "service-environment-name": (environment, "a-b_1", "a b"),
    "scheduling-policy-name": (policy, "a-b_1", "a b"),
    "queue-gains-scheduling-policy": (give_policy, True, False),
    "queue-loses-scheduling-policy": (take_policy, False, True),
    "scheduling-policy-in-use": (delete_policy, False, True),
    "time-limit-seconds": (time_limit, 600, 599),
    "share-decay-seconds": (lambda c, n: policy(c, shareDecaySeconds=n), NUMBER, NUMBER),
    "compute-reservation": (lambda c, n: policy(c, computeReservation=n), NUMBER, NUMBER),
    "share-weight": (shares, 999.9999, 1000.0),
    "shares-of-a-policy": (lambda c, n: shares(c, 1.0, n), NUMBER, NUMBER),
    "service-job-attempts": (
        lambda c, n: submit(c, retryStrategy={"attempts": n}), NUMBER, NUMBER
    ),
    "scheduling-priority": (lambda c, n: submit(c, schedulingPriority=n), NUMBER, NUMBER),
    "service-job-name": (lambda c, name: submit(c, jobName=name), "a-b_1", "a b"),
    "template-body-bytes": (template_body, NUMBER, NUMBER),
    "stack-name": (stack, "A-1", "a_b"),
    "parameter-value-bytes": (parameter_value, NUMBER, NUMBER),
    "template-bytes": (lambda c, n: stack(c, text=padded(n)), NUMBER, NUMBER),
    "template-resources": (lambda c, n: stack(c, **resources(numbered(n))), NUMBER, NUMBER),
    "template-outputs": (
        lambda c, n: stack(c, Outputs={name: {"Value": "v"} for name in numbered(n)}),
        NUMBER, NUMBER,
    ),
    "template-parameters": (
        lambda c, n: stack(c, Parameters={name: {"Type": "String"} for name in numbered(n)}),
        NUMBER, NUMBER,
    ),
    "template-mappings": (
        lambda c, n: stack(c, Mappings={name: {"a": {"b": "c"}} for name in numbered(n)}),
        NUMBER, NUMBER,
    ),
    "template-description-bytes": (lambda c, n: stack(c, Description=text_of(n)), NUMBER, NUMBER),
    "logical-id-characters": (lambda c, n: stack(c, **resources(["a" * n])), NUMBER, NUMBER),
    "alarm-period": (lambda c, n: alarm(c, Period=n), 30, 45),
    "alarm-query-period": (
        lambda c, n: math_alarm(c, query("a", period=n), expression("a")), 5, 45
    ),
    "alarm-day": (lambda c, n: alarm(c, EvaluationPeriods=n), 1440, 1441),
    "alarm-week": (lambda c, n: alarm(c, Period=3600, EvaluationPeriods=n), 168, 169),
    "alarm-datapoints": (lambda c, n: alarm(c, DatapointsToAlarm=n), 1, 2),
    "alarm-queries": (
        lambda c, n: math_alarm(
            c,
            expression("FILL(a, 0)"),
            query("a"),
            *(expression("a", name=name, returns=False) for name in numbered(n - 2)),
        ),
        NUMBER, NUMBER,
    ),
    "alarm-math-metrics": (
        lambda c, n: math_alarm(c, expression("n0"), *map(query, numbered(n))), NUMBER, NUMBER
    ),
    "alarm-returned-series": (
        lambda c, returns: math_alarm(c, query("a", returns=returns), expression("a")),
        False, True,
    ),
    "alarm-search": (
        lambda c, text: math_alarm(c, query("a"), expression(text)),
        "FILL(a, 0)", "SUM(SEARCH('{n} m', 'Sum', 60))",
    ),
    "alarm-query-ids": (
        lambda c, name: math_alarm(c, query(name), expression("1")), "a_1", "A"
    ),
    "alarm-missing-data": (lambda c, word: alarm(c, TreatMissingData=word), "ignore", "ok"),
    "metrics-per-call": (
        lambda c, n: c("cloudwatch").put_metric_data(
            Namespace="n", MetricData=[{"MetricName": "m", "Value": 1.0}] * n
        ),
        NUMBER, NUMBER,
    ),
    "metric-dimension-characters": (
        lambda c, text: datum(c, Value=1.0, Dimensions=[{"Name": "a", "Value": text}]),
        "a b", "é",
    ),
    "metric-values": (lambda c, n: datum(c, Values=[1.0] * n, Counts=[1.0] * n), NUMBER, NUMBER),
    "metric-value": (lambda c, n: datum(c, Value=n), -(2.0**360), 2.0**361),
    "metric-age-seconds": (
        lambda c, days: datum(c, Value=1.0, Timestamp=datetime.now(UTC) - timedelta(days=days)),
        13, 15,
    ),
    "metric-ahead-seconds": (
        lambda c, hours: datum(c, Value=1.0, Timestamp=datetime.now(UTC) + timedelta(hours=hours)),
        1, 3,
    ),
    "metric-resolution": (lambda c, n: datum(c, Value=1.0, StorageResolution=n), 1, 30),
    "dashboard-name": (lambda c, name: dashboard(c, name=name), "a-b_1", "a b"),
    "dashboard-widget-metrics": (dashboard, NUMBER, NUMBER),
    "dashboard-metrics": (
        lambda c, n: dashboard(c, *[500] * (n // 500), n % 500), NUMBER, NUMBER
    ),
    "template-user-data-bytes": (lambda c, n: template(c, UserData=encoded(n)), NUMBER, NUMBER),
    "user-data-bytes": (lambda c, n: run(c, UserData=b"x" * n), NUMBER, NUMBER),
    "launch-template-name": (lambda c, name: template(c, name), "a.b/(c)_1", "a b"),
    "launch-template-versions": (versions, 10_000, 10_001),
    "volume-size": (lambda c, n: volume(c, Size=n), NUMBER, NUMBER),
    "volume-iops": (lambda c, n: volume(c, Iops=n), NUMBER, NUMBER),
    "volume-mibps": (lambda c, n: volume(c, Iops=8000, Throughput=n), 125, 124),
    "volume-iops-per-gib": (lambda c, n: volume(c, Size=10, Iops=n), 5000, 5001),
    "volume-mibps-per-iops": (lambda c, n: volume(c, Throughput=n), 750, 751),
    "snapshot-rate": (lambda c, n: volume(c, VolumeInitializationRate=n), 300, 301),
    "metadata-hop-limit": (
        lambda c, n: run(c, MetadataOptions={"HttpPutResponseHopLimit": n}), NUMBER, NUMBER
    ),
    "metadata-tag-key": (metadata_tag, "a.b", "a b"),
    "security-groups-per-interface": (groups, NUMBER, NUMBER),
    "tags-per-resource": (template_tags, NUMBER, NUMBER),
    "tag-key-characters": (lambda c, n: tagged(c, ("k" * n, "v")), NUMBER, NUMBER),
    "tag-value-characters": (lambda c, n: tagged(c, ("k", "v" * n)), NUMBER, NUMBER),
    "tag-key-reserved": (lambda c, key: tagged(c, (key, "v")), "awsome", "aws:k"),
    "security-group-name": (group, "a.b", "sg-a"),
    "security-group-description": (
        lambda c, text: group(c, description=text), "a.b", "a’s"
    ),
    "rule-description": (rule, "a.b", "a’s"),
    "endpoint-subnets-in-different-zones": (endpoint, "ab", "aa"),
    "fleet-subnets-in-different-zones": (
        lambda c, zones: fleet(c, *({"SubnetId": s} for s in subnets(c, *zones)[1])), "ab", "aa"
    ),
    "fleet-pools": (pools, NUMBER, NUMBER),
    "fleet-target-capacity": (lambda c, n: fleet(c, TargetCapacity=n), NUMBER, NUMBER),
    "fleet-rebalance-delay": (rebalance, NUMBER, NUMBER),
    "filter-values": (
        lambda c, n: c("ec2").describe_vpcs(Filters=[{"Name": "tag:a", "Values": numbered(n)}]),
        NUMBER, NUMBER,
    ),
    "rule-targets": (targets, NUMBER, NUMBER),
    "rule-schedule": (
        lambda c, text: put_rule(c, ScheduleExpression=text), "rate(10 minutes)", "rate(1 minutes)"
    ),
    "target-inputs": (target, {"Input": "{}"}, {"Input": "{}", "InputPath": "$.a"}),
    "event-entries-bytes": (event, NUMBER, NUMBER),
    "role-inline-policies": (inline, NUMBER, NUMBER),
    "managed-policy-characters": (
        lambda c, n: c("iam").create_policy(PolicyName=new(), PolicyDocument=document(n)),
        NUMBER, NUMBER,
    ),
    "trust-policy-characters": (role, NUMBER, NUMBER),
    "policies-of-a-role": (attached, NUMBER, NUMBER),
    "key-policy-bytes": (
        lambda c, n: c("kms").create_key(Policy=document(200).ljust(n)), NUMBER, NUMBER
    ),
    "function-timeout": (lambda c, n: function(c, Timeout=n), NUMBER, NUMBER),
    "function-memory": (lambda c, n: function(c, MemorySize=n), NUMBER, NUMBER),
    "function-environment-bytes": (variables, NUMBER, NUMBER),
    "function-reserved-variables": (
        lambda c, name: function(c, Environment={"Variables": {name: "v"}}),
        "AWS_ENDPOINT_URL", "AWS_REGION",
    ),
    "function-log-levels": (
        lambda c, form: function(
            c, LoggingConfig={"LogFormat": form, "ApplicationLogLevel": "INFO"}
        ),
        "JSON", "Text",
    ),
    "function-async-payload": (invoke, NUMBER, NUMBER),
    "function-policy-bytes": (permissions, 20, 80),
    "log-retention-days": (retention, 14, 10),
    "log-group-reserved": (log_group, "/aws/a", "aws/a"),
    "log-events-span-ms": (lambda c, n: events(c, n, 0), NUMBER, NUMBER),
    "log-batch-bytes": (
        lambda c, n: events(c, 0, message="x" * (n - 26)), NUMBER, NUMBER
    ),
    "object-key-bytes": (lambda c, n: put(c, text_of(n)), NUMBER, NUMBER),
    "object-metadata-bytes": (
        lambda c, n: put(c, Metadata={"a": "x" * (n - 1)}), NUMBER, NUMBER
    ),
    "upload-part-order": (parts, [1, 2], [2, 1]),
    "delete-keys": (delete, NUMBER, NUMBER),
    "bucket-tags": (
        lambda c, n: c("s3").put_bucket_tagging(Bucket=made_bucket(c), **tag_set(n)), NUMBER, NUMBER
    ),
    "if-none-match": (lambda c, tag: put(c, IfNoneMatch=tag), "*", '"a"'),
    "lifecycle-rule-id": (lambda c, n: lifecycle(c, ID="r" * n, **EXPIRES), NUMBER, NUMBER),
    "lifecycle-expiration-days": (lambda c, n: lifecycle(c, Expiration={"Days": n}), 1, 0),
    "lifecycle-transition-days": (
        lambda c, n: lifecycle(c, Transitions=[{"Days": n, "StorageClass": "STANDARD_IA"}]),
        30, 29,
    ),
    "lifecycle-newer-versions": (
        lambda c, n: lifecycle(
            c, NoncurrentVersionExpiration={"NoncurrentDays": 1, "NewerNoncurrentVersions": n}
        ),
        NUMBER, NUMBER,
    ),
    "subject-characters": (
        lambda c, text: c("sns").publish(TopicArn=topic(c), Message="m", Subject=text),
        "a" * 99, "a\nb",
    ),
    "email-endpoint": (
        lambda c, who: c("sns").subscribe(TopicArn=topic(c), Protocol="email", Endpoint=who),
        "a@example.org", "a.example.org",
    ),
    "topic-tags": (
        lambda c, n: topic(c, Tags=[{"Key": name, "Value": "v"} for name in numbered(n)]),
        NUMBER, NUMBER,
    ),
    "standard-parameter-bytes": (lambda c, n: parameter(c, value="x" * n), NUMBER, NUMBER),
    "advanced-parameter-bytes": (
        lambda c, n: parameter(c, value="x" * n, Tier="Advanced"), NUMBER, NUMBER
    ),
    "parameter-downgrade": (downgrade, "Advanced", "Standard"),
    "parameter-pattern": (
        lambda c, value: parameter(c, value=value, AllowedPattern=r"^\d+$"), "1", "a"
    ),
    "parameter-nesting": (lambda c, value: parameter(c, value=value), "{{", "a {{b}} c"),
    "parameter-name": (parameter, "/a-b/c.d_e", "/a b"),
    "parameter-name-characters": (lambda c, n: parameter(c, "x" * (n - 45)), NUMBER, NUMBER),
    "parameter-levels": (lambda c, n: parameter(c, "/a" * n), 15, 16),
}  # fmt: skip
