"""Stack parameters: what follows from the size, what overrides it, and what is refused."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from sizing import catalogue
from stacks.parameters import StackParameters
from stacks.parameters.context import CDK_JSON, defaults
from stacks.parameters.fields import KINDS

KEY = "arn:aws:kms:us-east-1:123456789012:key/0f0e0d0c-1111-2222-3333-444455556666"


def test_every_parameter_has_its_default_in_cdk_json() -> None:
    assert {name for name in defaults() if not name.startswith("train.")} == {*KINDS}


def test_the_volumes_speed_is_what_the_size_sustains() -> None:
    speeds = {
        size: (p.data_volume.mib_per_second, p.data_volume.iops)
        for size in ("g5.xlarge", "g5.4xlarge", "g5.8xlarge")
        for p in [StackParameters.for_size(size)]
    }
    assert speeds == {
        "g5.xlarge": (125, 3000),
        "g5.4xlarge": (566, 3000),
        "g5.8xlarge": (1907, 7628),
    }


def test_context_overrides_by_name_and_texts_become_numbers() -> None:
    context = {**defaults(), "size": "g5.xlarge", "data_volume.gib": "400", "max_hours": "1.5"}
    parameters = StackParameters.from_context(context)
    assert (parameters.data_volume.gib, parameters.max_hours) == (400, 1.5)


def test_cdks_own_context_is_passed_over() -> None:
    context = {
        "@aws-cdk/core:bootstrapQualifier": "localhost",
        "aws:cdk:enable-path-metadata": True,
        "acknowledged-issue-numbers": [34892],
        "cli-telemetry": False,
    }
    assert StackParameters.from_context(context) == StackParameters.for_size("g5.2xlarge")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("sise", "g5.xlarge", "context 'sise' is unknown; did you mean size?"),
        ("zzzzzz", "1", "context 'zzzzzz' is unknown; known are name, size, workload"),
        ("name", "1st", "name is '1st'; use a letter, then letters, digits and - (40)"),
        ("prefix", "my team", "prefix is 'my team'; use a letter, then letters, digits and - (40)"),
        ("prefix", 41 * "p", "p'; use a letter, then letters, digits and - (40)"),
        ("prefix", "AwsTeam-", "prefix is 'AwsTeam-'; use a letter"),
        ("vpc", "vpc-12345678", "vpc is 'vpc-12345678' without subnets; add subnets=subnet-..."),
        ("subnets", "subnet-12345678", "subnets are subnet-12345678, but vpc is empty; add vpc="),
        ("tags.AWS:x", "1", "tags.AWS:x begins with aws:, which AWS reserves"),
        ("tags.Stack", "1", "tags.Stack is the stack's own, also in other letter cases; use"),
        # IAM ignores the case of a tag's key, and refuses a role with two of one.
        ("tags.stack", "prod", "tags.stack is the stack's own, also in other letter cases; use"),
        ("tags", {"team": "a", "Team": "b"}, "tags are team, Team; name each only once"),
        ("tags.my|key", "1", "the tag's key is 'my|key'; use 1 to 128 letters, digits, spaces and"),
        ("tags." + "k" * 129, "1", "; use 1 to 128 letters, digits, spaces and _.:/=+@-"),
        ("tags.team", "a|b", "tags.team is 'a|b'; use at most 256 letters, digits, spaces and"),
        ("tags", {str(key): "1" for key in range(48)}, "48 tags are given; a resource takes 47"),
        ("tags", "team", "tags is 'team'; set each with -c tags.NAME=VALUE"),
        ("size", "g5.3xlarge", "size 'g5.3xlarge' is not in the instance catalogue; the nearest"),
        ("size", "t3.large", "size t3.large has no NVIDIA GPU of its own; the smallest"),
        ("size", "g6f.large", "size g6f.large has no NVIDIA GPU of its own"),
        ("size", "g7e.2xlarge", "size g7e.2xlarge is not among the sizes of the default image's"),
        ("size", "p3dn.24xlarge", "size p3dn.24xlarge has an NVIDIA V100, which PyTorch no longer"),
        ("size", "p5e.48xlarge", "size p5e.48xlarge has no price in the catalogue"),
        ("workload", "trajectroy", "workload is 'trajectroy' (did you mean trajectory?); for"),
        ("recipe", "full;rm", "recipe is 'full;rm'; use letters"),
        ("recipe", "ful", "recipe is 'ful', which trajectory does not have; did you mean fu"),
        ("recipe", "zzz", "which trajectory does not have; known are demo, full"),
        ("run_id", "exp 7", "run_id is 'exp 7'; use a letter"),
        ("run_id", "7", "run_id is '7'; use a letter"),
        ("dataset", "../other", "dataset is '../other'; use a key prefix"),
        ("overrides", "lr=$(id)", "overrides is 'lr=$(id)'; use NAME=VALUE"),
        ("overrides", "lr", "overrides is 'lr'; use NAME=VALUE"),
        ("overrides", "a=" + "1" * 2000, "overrides are longer than 2000 characters"),
        ("dataset_bucket", "My_Data", "dataset_bucket is 'My_Data'; use a bucket's name"),
        ("zones", "a,b", "zones is 'a'; use zones like us-east-1a"),
        ("zones", "us-east-1a us-east-1a", "zones are us-east-1a, us-east-1a; name each only once"),
        (
            "pytorch_ami_parameter",
            "ubuntu",
            "pytorch_ami_parameter is 'ubuntu'; use the name of an SSM",
        ),
        (
            "pytorch_ami_parameter",
            "/dlami/gpu-pytorch-2.12-amazon-linux-2023/latest/ami-id",
            "the root device of Amazon Linux is not /dev/sda1: use one of Ubuntu 24.04 or newer",
        ),
        (
            "pytorch_ami_parameter",
            "/dlami/gpu-pytorch-2.7-ubuntu-22.04/latest/ami-id",
            "the Python of that release is too old to boot with: use one of Ubuntu 24.04",
        ),
        ("root_volume.gib", "50", "root_volume.gib is 50; use 100 to 65536"),
        (
            "root_volume.initialization_mib_per_second",
            "99",
            "mib_per_second is 99; use 100 to 300, or 0 for the default rate",
        ),
        ("root_volume.initialization_mib_per_second", "301", "is 301; use 100 to 300, or 0"),
        ("data_on", "ssd", "data_on is 'ssd'; use ebs or nvme"),
        ("data_volume.gib", "0", "data_volume.gib is 0; use 1 to 65536"),
        ("data_volume.gib", "big", "data_volume.gib is 'big'; use a whole number"),
        ("data_volume.mib_per_second", "100", "data_volume.mib_per_second is 100; use 125 to 417"),
        ("data_volume.mib_per_second", "500", "the most that g5.xlarge can use"),
        ("data_volume.iops", "2000", "data_volume.iops is 2000; use 3000 to 15000"),
        ("dataset_gib", "-1", "dataset_gib is -1; use 0 or more"),
        ("dataset_manifest", "/no/manifest.json", "dataset_manifest is '/no/manifest.json', which"),
        ("mix_gpus", "perhaps", "mix_gpus is 'perhaps'; use true or false"),
        ("alarm.email", "me", "alarm.email is 'me'; use one address like you@example.org"),
        ("alarm.email", "a@b.org,c@d.org", "use one address like you@example.org, or nothing"),
        ("alarm.disk_percent", "100", "alarm.disk_percent is 100; use more than 0, less than 100"),
        ("alarm.gpu_celsius", "200", "alarm.gpu_celsius is 200; use 40 to 110"),
        ("alarm.commit_seconds", "60", "alarm.commit_seconds is 60; use 600 to 86400"),
        ("train.checkpoint_interval", "3601s", "alarm.commit_seconds is 7200; use 7202 to 86400"),
        ("kms", "yes", "kms is 'yes'; use create, the ARN of a key, or nothing"),
        ("on_demand_base", "2", "on_demand_base is 2; use 0 to 1, because the base is part"),
        ("target_capacity", "3", "target_capacity is 3; use 0 to 1: 0: a fleet"),
        ("guard.max_barren_attempts", "0", "guard.max_barren_attempts is 0; use 1 to 100"),
        ("notice_budget_seconds", "300", "notice_budget_seconds is 300; use 5 to 120"),
        (
            "train.notice_policy",
            "go",
            "train.notice_policy: 'go' is unknown; use train-on or stop",
        ),
        ("train.lease_ttl_seconds", "1", "train.lease_ttl_seconds is 1; use 2 to 600"),
        ("dataset_wait_seconds", "-1", "dataset_wait_seconds is -1; use 0 to 86400"),
        ("max_hours", "nan", "max_hours is 'nan'; use a number"),
        ("max_hours", "0", "max_hours is 0; use more than 0, at most 8760"),
        ("versions_kept_days", "0", "versions_kept_days is 0; use 1 to 365: how long deleted"),
        ("max_usd", "-1", "max_usd is -1; use 0 to 999999: dollars after which"),
        ("max_usd", "much", "max_usd is 'much'; use a number"),
        # As of a variable that is not set; 0 would be no limit.
        ("max_usd", "", "max_usd is ''; use a number"),
        ("tags.", "1", "context 'tags.' is unknown"),
        ("max_wait_hours", "-0.5", "max_wait_hours is -0.5; use 0 to 8760: hours without a"),
        ("deadline_hours", "-3", "deadline_hours is -3; use 0 to 8760: hours within which"),
        ("deadline_hours", "9000", "deadline_hours is 9000; use 0 to 8760: hours within which"),
        ("alternates_price_factor", "0.5", "alternates_price_factor is 0.5; use 1 to 100"),
        ("train.nan_retries", "1001", "train.nan_retries is 1001; use 0 to 1000"),
        ("train.nan_skips", "1.5", "train.nan_skips: '1.5' is not a whole number, 0 or more"),
        ("train.nan_skip", "1", "context 'train.nan_skip' is unknown; did you mean train.nan_skip"),
        ("train", "keep=3", "train is 'keep=3'; set each with -c train.NAME=VALUE"),
        ("keep", "4", "context 'keep' is unknown; did you mean train.keep?"),
        ("alarm_email", "a@b.org", "context 'alarm_email' is unknown; did you mean alarm.email?"),
        ("max_barren_attempts", "3", "is unknown; did you mean guard.max_barren_attempts?"),
        (
            "env.MODE",
            "x",
            'env.MODE is for programs: write it into its program.json, as part of "env',
        ),
        ("quiet_seconds", "3", "quiet_seconds is for programs: write it into its program.json"),
        (
            "guard.heartbeat_timeout_seconds",
            "2399",
            "guard.heartbeat_timeout_seconds is 2399; use 2400 or more",
        ),
    ],
)
def test_fails_in_one_sentence(name: str, value: object, sentence: str) -> None:
    context = {**defaults(), "size": "g5.xlarge", name: value}
    with pytest.raises(ValueError, match=re.escape(sentence)) as refusal:
        StackParameters.from_context(context)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vpc": "vpc-1"}, "vpc is 'vpc-1'; use an id like vpc-0123456789abcdef0"),
        ({"subnets": "subnet-12345678,net"}, "subnets is 'net'; use ids like subnet-01234567"),
        ({"subnets": "subnet-12345678,subnet-12345678"}, "name each only once"),
        ({"zones": "us-east-1a"}, "zones are us-east-1a, but the subnets decide them; drop zones"),
        (
            {"subnets": ",".join(f"subnet-{number:08x}" for number in range(301))},
            "Spot capacity pools, and a fleet takes 300; name fewer subnets",
        ),
    ],
)
def test_fails_for_a_network_that_cannot_be(change: dict[str, str], sentence: str) -> None:
    given = {"vpc": "vpc-12345678", "subnets": "subnet-12345678", **change}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        StackParameters.for_size("g5.xlarge", **given)


def test_fails_for_iops_that_the_throughput_needs_more_of() -> None:
    with pytest.raises(ValueError, match="1000 MiB/s need 4000"):
        StackParameters.for_size(
            "g5.8xlarge", **{"data_volume.mib_per_second": 1000, "data_volume.iops": 3000}
        )


def test_fails_for_a_volume_too_small_for_its_speed() -> None:
    with pytest.raises(ValueError, match=r"data_volume\.gib is 10; 7628 IOPS need 16 or more"):
        StackParameters.for_size("g5.8xlarge", **{"data_volume.gib": 10})


@pytest.mark.parametrize(
    ("context", "sentence"),
    [
        ({"kms": "create"}, "adopted that stack does not exist; use the ARN of a key"),
        ({"access_logs": "true"}, "access_logs is true, but both buckets are adopted"),
        (
            {"versions_kept_days": "1"},
            "versions_kept_days is 1, but nothing here manages my-runs; give it a lifecycle rule",
        ),
    ],
)
def test_fails_for_protection_of_buckets_that_others_manage(
    context: dict[str, str], sentence: str
) -> None:
    adopted = {"dataset_bucket": "my-data", "run_bucket": "my-runs"}
    with pytest.raises(ValueError, match=sentence):
        StackParameters.for_size("g5.xlarge", **adopted, **context)
    assert StackParameters.for_size("g5.xlarge", **adopted, kms=KEY).kms == KEY


def test_a_manifest_says_how_large_the_dataset_is(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    files = [{"name": f"{number}.bin", "bytes": 100 * 2**30} for number in range(2)]
    manifest.write_text(json.dumps({"files": files}))
    given = {"dataset_manifest": str(manifest)}
    with pytest.raises(ValueError, match=r"the dataset has 200.0 GiB .* use 220 or more"):
        StackParameters.for_size("g5.xlarge", **given)
    fitting = StackParameters.for_size("g5.xlarge", **given, **{"data_volume.gib": 220})
    assert fitting.dataset_gib == 200


def test_mixed_gpus_widen_the_pools_and_keep_count_and_memory() -> None:
    same, mixed = (
        {catalogue.find(size).gpu for size in StackParameters.for_size("g5.2xlarge", **c).sizes}
        for c in ({}, {"mix_gpus": "true"})
    )
    assert same == {"NVIDIA A10G"}
    assert same < mixed
    wanted = catalogue.find("g5.2xlarge")
    for size in StackParameters.for_size("g5.2xlarge", mix_gpus=True).sizes:
        other = catalogue.find(size)
        assert (other.num_gpus, other.memory_gib >= wanted.memory_gib) == (1, True)
        assert other.gpu_memory_mib >= wanted.gpu_memory_mib


def test_mixed_counts_are_planned_size_by_size_and_limited_by_the_slowest() -> None:
    long = {"workload": "imagenet", "recipe": "epochs_88", "overrides": "micro_batch=128"}
    alone, mixed = (
        StackParameters.for_size("g5.12xlarge", **long, mix_gpu_counts=mixed)
        for mixed in (False, True)
    )
    gpus = {plan.request.size: plan.request.gpus for plan in mixed.plans}
    fours = {"g5.12xlarge": 4, "g5.24xlarge": 4}
    assert gpus == fours | {"g5.4xlarge": 1, "g5.8xlarge": 1, "g5.48xlarge": 8}
    assert len(alone.plans) == 1
    assert alone.max_hours < mixed.max_hours
    # Seventeen hours of eight GPUs, not as many as of one GPU.
    assert (mixed.max_hours, mixed.max_usd) == (114, 280)


@pytest.mark.parametrize("override", ["reduction=ring", "sharding=full"])
def test_fails_for_mixed_counts_where_results_depend_on_them(override: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"the result of {override} may depend on the number of"):
        StackParameters.for_size("g5.xlarge", mix_gpu_counts=True, overrides=override)
    program = {"program": "bash run.sh", "source": str(tmp_path)}
    with pytest.raises(ValueError, match="the result of a program may depend on the number of GPU"):
        StackParameters.for_size("g5.xlarge", mix_gpu_counts=True, **program)


def test_fails_for_a_base_without_capacity() -> None:
    with pytest.raises(ValueError, match="on_demand_base is 1; use 0 to 0"):
        StackParameters.for_size("g5.xlarge", target_capacity=0, on_demand_base=1)


def test_the_flags_that_cdk_recommends_are_all_decided() -> None:
    flags = json.loads(CDK_JSON.read_text(encoding="utf-8"))["context"]
    # The default security group's flag adds a custom resource; the default rules cap gp3 in launch
    # templates at 16,000 IOPS, wrongly; a weak reference is an intrinsic of this year.
    assert flags["@aws-cdk/aws-ec2:restrictDefaultSecurityGroup"] is False
    assert flags["@aws-cdk/core:validateAgainstDefaultRules"] is False
    assert flags["@aws-cdk/core:defaultCrossStackReferences"] == "strong"
    cli = CDK_JSON.parent / "node_modules/aws-cdk/lib/init-templates"
    recommended = json.loads((cli / ".recommended-feature-flags.json").read_text(encoding="utf-8"))
    assert set(recommended) <= set(flags)


def test_the_instance_store_must_hold_the_dataset_on_every_size_of_the_fleet() -> None:
    on_nvme = StackParameters.for_size("g5.2xlarge", data_on="nvme", dataset_gib=300)
    assert on_nvme.data_gib == 419  # of 450 GB
    # The smallest of the fleet's sizes decides, and the volume's own size does not matter.
    small = {"data_on": "nvme", "data_volume.gib": 1}
    assert StackParameters.for_size("g5.xlarge", **small).data_gib == 232
    with pytest.raises(ValueError, match=r"has 232 GiB; the dataset has 300\.0 GiB and needs 330"):
        StackParameters.for_size("g5.xlarge", data_on="nvme", dataset_gib=300)


def test_fails_on_the_instance_store_of_a_size_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = dataclasses.replace(catalogue.find("g5.2xlarge"), instance_store_gb=0)
    known = catalogue.instances()
    monkeypatch.setattr(catalogue.sizes, "instances", lambda: {**known, "g5.2xlarge": bare})
    with pytest.raises(ValueError, match=r"and g5\.2xlarge has no instance store; use ebs"):
        StackParameters.for_size("g5.xlarge", data_on="nvme")


def test_a_group_given_as_a_dictionary_overrides_its_defaults() -> None:
    given = StackParameters.for_size("g5.xlarge", alarm={"email": "you@example.org"})
    assert given.alarm.email == "you@example.org"
    assert given.alarm.disk_percent == StackParameters.for_size("g5.xlarge").alarm.disk_percent


def test_alternates_are_of_families_that_the_region_sells() -> None:
    """EC2 refuses a request with a type that the region has nowhere."""
    for size, region, others in (
        ("g5.xlarge", "eu-west-1", ["g5.2xlarge", "g5.4xlarge"]),
        ("g6.8xlarge", "me-central-1", ["g5.8xlarge", "g6.16xlarge"]),
        ("g5.xlarge", "nowhere-1", ["g6.xlarge", "g6.2xlarge", "g5.2xlarge", "g6.4xlarge"]),
    ):
        p = StackParameters.for_size(size, region=region, mix_gpus=True)
        assert p.sizes == (size, *others)
    for size in catalogue.instances():
        assert catalogue.alternates(size) == catalogue.alternates(size, region="nowhere-1")
