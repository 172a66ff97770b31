"""The kept stack: its buckets, what protects them, and how existing ones are adopted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aws_cdk import App

from stacks import DatasetStack, StackParameters


@pytest.fixture(scope="module")
def kept(templates: dict[str, Any]) -> Any:
    return templates["DatasetStack"]["Resources"]


# CloudFormation knows a resource by its logical id: another one is another, empty bucket.
STATEFUL = {"DatasetBucket9BE8B15B", "RunBucketCA76775A"}


def _of_type(resources: Any, type_name: str) -> dict[str, Any]:
    return {name: each for name, each in resources.items() if each["Type"] == type_name}


def test_no_rule_expires_what_can_be_read_but_shared_artifacts(kept: Any) -> None:
    buckets = _of_type(kept, "AWS::S3::Bucket").values()
    rules = [
        rule
        for bucket in buckets
        for rule in bucket["Properties"]["LifecycleConfiguration"]["Rules"]
    ]
    shared = [rule for rule in rules if "ExpirationInDays" in rule]
    assert [(rule["Prefix"], rule["ExpirationInDays"]) for rule in shared] == [("artifacts/", 90)]
    rules.remove(shared[0])
    for rule in rules:
        assert not {"ExpirationInDays", "ExpirationDate", "Transitions"} & set(rule)
        assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert [rule.get("NoncurrentVersionExpiration") for rule in rules] == [
        None,
        {"NoncurrentDays": 14},
    ]


def test_deleted_checkpoints_stay_for_as_long_as_asked(synthesize: Callable[..., Any]) -> None:
    kept = synthesize(versions_kept_days="3")["DatasetStack"]["Resources"]
    (rules,) = [
        bucket["Properties"]["LifecycleConfiguration"]["Rules"]
        for name, bucket in _of_type(kept, "AWS::S3::Bucket").items()
        if name.startswith("RunBucket")
    ]
    assert {"NoncurrentDays": 3} in [each.get("NoncurrentVersionExpiration") for each in rules]


def test_only_the_run_bucket_keeps_versions(kept: Any) -> None:
    versioned = [
        name
        for name, bucket in _of_type(kept, "AWS::S3::Bucket").items()
        if bucket["Properties"].get("VersioningConfiguration") == {"Status": "Enabled"}
    ]
    assert versioned == ["RunBucketCA76775A"]


def test_a_head_is_never_put_unconditionally(kept: Any) -> None:
    (statement,) = [
        each
        for policy in _of_type(kept, "AWS::S3::BucketPolicy").values()
        for each in policy["Properties"]["PolicyDocument"]["Statement"]
        if each.get("Sid") == "DenyUnconditionalHeads"
    ]
    assert statement["Effect"] == "Deny"
    assert statement["Action"] == "s3:PutObject"
    assert statement["Principal"] == {"AWS": "*"}
    assert statement["Resource"]["Fn::Join"][1][1] == "/runs/*/head.json"
    # Both must be missing for the denial: the keys of one operator are joined by AND.
    assert statement["Condition"] == {"Null": {"s3:if-match": "true", "s3:if-none-match": "true"}}


def test_names_and_arns_are_exported_whoever_uses_them(templates: dict[str, Any]) -> None:
    exports = {
        each["Export"]["Name"]
        for each in templates["DatasetStack"]["Outputs"].values()
        if "Export" in each
    }
    for bucket in STATEFUL:
        assert any(f"Ref{bucket}" in name for name in exports)
        assert any(f"GetAtt{bucket}Arn" in name for name in exports)


def test_an_importing_app_may_keep_access_logs(tmp_path: Path) -> None:
    """Also one whose cdk.json has none of CDK's flags."""
    app = App(outdir=str(tmp_path), builtin_cloud_formation_validation=False)
    given = StackParameters.for_size("g5.xlarge", access_logs=True)
    DatasetStack(app, "Data", parameters=given)
    (stack,) = app.synth().stacks
    assert len(_of_type(stack.template["Resources"], "AWS::S3::Bucket")) == 3


def test_adopted_buckets_are_used_and_not_made(synthesize: Callable[..., Any]) -> None:
    templates = synthesize(dataset_bucket="my-data", run_bucket="my-runs")
    assert set(templates) == {"NetworkStack", "RunImage-run-1-02012aed", "TrainingStack"}
    text = str(templates["TrainingStack"])
    assert "DATASET_URI=s3://my-data/trajectory\\n" in text
    assert "RUN_URI=s3://my-runs/runs/run-1\\n" in text
    assert "ImportValue': 'Dataset" not in text


def test_one_adopted_bucket_leaves_the_other_in_its_place(synthesize: Callable[..., Any]) -> None:
    templates = synthesize(dataset_bucket="my-data")
    buckets = _of_type(templates["DatasetStack"]["Resources"], "AWS::S3::Bucket")
    assert set(buckets) == {"RunBucketCA76775A"}
