"""Checks of the stack parameters: each refusal is one sentence that says what to do instead.

The last are of what protects data, of whom a review trusts, and of what a stack shares with others
in its account: its name, network and tags.
"""

import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from contract.aws_limits import aws_limits, least, most
from contract.errors import UserError
from contract.grammar import parse_interval
from contract.keys import PERIODS
from contract.program import WORKLOAD as PROGRAM
from contract.run_env import DATA_PLACES
from contract.suggestion import suggest
from contract.trainer_options import check_option
from sizing import catalogue
from stacks.parameters.context import defaults
from stacks.parameters.fields import KINDS, ParameterFields
from stacks.parameters.workloads import described, is_own, recipes, workloads

# gp3: the baseline included in the volume's price, and the maximums.
GP3_MIN_IOPS, GP3_MAX_IOPS = least("volume-iops"), most("volume-iops")
GP3_MIN_MIB_PER_SECOND, GP3_MAX_MIB_PER_SECOND = least("volume-mibps"), most("volume-mibps")
GP3_IOPS_PER_MIB_PER_SECOND = round(1 / aws_limits()["volume-mibps-per-iops"].most)
GP3_MAX_IOPS_PER_GIB = most("volume-iops-per-gib")
EBS_INITIALIZATION_MIB_PER_SECOND = range(least("snapshot-rate"), most("snapshot-rate") + 1)
# The volumes are made for Ubuntu, whose root device this is; Amazon Linux has /dev/xvda.
ROOT_DEVICE_NAME = "/dev/sda1"
# The kinds of fleet (stacks/fleet.py).
FLEETS = ("spot", "asg")
# The first release whose own Python runs the boot programs: 22.04 has 3.10.
MIN_UBUNTU = 24.04
# Boot, package check and the start of the sync, until that reports progress to the Guard.
BOOT_ALLOWANCE_SECONDS = 600

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ZONE = re.compile(r"[a-z]{2}(-[a-z]+)+-\d[a-z]")
# Overrides are in double quotes in run.env and on a command line: no shell characters.
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=[A-Za-z0-9_.,:+/@%-]+")
_AMI = re.compile(r"ami-[0-9a-f]{8,17}|(/[A-Za-z0-9_.-]+)+")
_EMAIL = re.compile(r"[^@\s,;]+@[^@\s,;.]+(\.[^@\s,;.]+)+")
# Volume size per dataset size: the rest is for the file system and staged checkpoints.
VOLUME_PER_DATASET = 1.1
# Overrides that make results depend on the number of ranks.
_BY_RANKS = ("reduction=ring", "sharding=full")
# The user data is limited to 16,384 bytes in all; this is what the other values leave.
_MAX_OVERRIDES_CHARACTERS = 2000
# A run id begins with the name, and a stack's name ends with it. With the prefix and Training- it
# stays far below CloudFormation's 128 characters.
_STACK = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,39}")
# The fleet's parameter begins with the stack's name, and Systems Manager reserves these two.
_STACK_PREFIX = re.compile(rf"(?!(?i:aws|ssm)){_STACK.pattern}")
_VPC = re.compile(r"vpc-([0-9a-f]{8}|[0-9a-f]{17})")
_SUBNET = re.compile(r"subnet-([0-9a-f]{8}|[0-9a-f]{17})")
_MAX_KEY, _MAX_VALUE = most("tag-key-characters"), most("tag-value-characters")
_TAG_KEY = re.compile(rf"[\w .:/=+@-]{{1,{_MAX_KEY}}}")
_TAG_VALUE = re.compile(rf"[\w .:/=+@-]{{0,{_MAX_VALUE}}}")
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}=\d{1,5}(\.\d+)?")
_IMAGE_REPOSITORY = re.compile(r"[a-z0-9]+([._/-][a-z0-9]+)*")
# Permissions, metrics and the Guard rely on the first two.
OUR_TAGS = ("Stack", "RunId", "Name")
OURS = 1000  # the priority of a tag that no app's own may replace
# The limit per resource; what AWS adds itself (aws:) does not count.
_MAX_TAGS = most("tags-per-resource") - len(OUR_TAGS)
_KEY = re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[A-Za-z0-9-]+")
_OIDC_PROVIDER = re.compile(
    r"arn:aws[a-z-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com"
)
_REPOSITORY = re.compile(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+|[A-Za-z0-9-]+@\d+/[A-Za-z0-9._-]+@\d+")
# As `kms`: create a key in DatasetStack. Any other value is the ARN of an existing key.
NEW_KEY = "create"


def refuse_unless(is_fine: object, message: str) -> None:
    """Raise `message` as a user's mistake unless `is_fine`."""
    if not is_fine:
        raise ValueError(message)


def check_match(name: str, value: str, pattern: re.Pattern[str], advice: str) -> None:
    """Refuse a value that does not match, with advice."""
    refuse_unless(pattern.fullmatch(value), f"{name} is {value!r}; {advice}")


def _check_distinct(name: str, values: Sequence[str], names: Sequence[str] = ()) -> None:
    """Refuse values of which two are the same, or have the same name."""
    names = names or values
    refuse_unless(
        len({*names}) == len(names), f"{name} are {', '.join(values)}; name each only once"
    )


def check_ranges(p: ParameterFields) -> None:
    """Refuse numbers beyond the limits that their fields name."""
    for name, value in p.flat().items():
        kind = KINDS.get(name)
        if kind is None or isinstance(value, str | tuple) or kind.least <= value <= kind.most:
            continue
        raise ValueError(f"{name} is {value:g}; use {kind.range}: {kind.meaning}")


def check_names(p: ParameterFields) -> None:
    """Refuse names that S3, systemd or a shell would misread."""
    if is_own(p.workload):
        refuse_unless(
            p.source,
            f"workload is {p.workload!r}, whose code is on no machine; add source=FOLDER, the "
            "folder of its module",
        )
    elif not p.program:
        check_workload(p.workload, p.recipe)
    refuse_unless(
        not p.source or Path(p.source).is_dir(), f"source is {p.source!r}, which is not a folder"
    )
    check_match("run_id", p.run_id, _NAME, "use a letter, then letters, digits, - and _ (63)")
    check_match("dataset", p.dataset, _PREFIX, "use a key prefix like trajectory or clips/v2")
    for override in p.overrides:
        check_match("overrides", override, _OVERRIDE, "use NAME=VALUE without shell characters")
    refuse_unless(
        len(" ".join(p.overrides)) <= _MAX_OVERRIDES_CHARACTERS,
        f"overrides are longer than {_MAX_OVERRIDES_CHARACTERS} characters; write a recipe instead",
    )
    for name in ("dataset_bucket", "run_bucket"):
        if getattr(p, name):
            check_match(name, getattr(p, name), _BUCKET, "use a bucket's name, or nothing")
    for zone in p.zones:
        check_match("zones", zone, _ZONE, "use zones like us-east-1a,us-east-1b, or nothing")
    _check_distinct("zones", p.zones)
    check_match(
        "pytorch_ami_parameter",
        p.pytorch_ami_parameter,
        _AMI,
        "use the name of an SSM parameter, starting with /, or an ami- id",
    )
    _check_image(p.pytorch_ami_parameter)


def check_workload(workload: str, recipe: str) -> None:
    """Refuse a workload, or a recipe of it, that training/registry.py does not name."""
    known = workloads()
    refuse_unless(
        workload in known,
        f"workload is {workload!r} ({suggest(workload, sorted(known))}); for one of your own, use "
        "workload=package.module:NAME and source=FOLDER; for a script, program=COMMAND",
    )
    check_match("recipe", recipe, _NAME, "use letters, digits, - and _")
    refuse_unless(
        recipe in recipes(workload),
        f"recipe is {recipe!r}, which {workload} does not have; "
        f"{suggest(recipe, sorted(recipes(workload)))}",
    )


def check_by_trainer(p: ParameterFields) -> None:
    """Refuse what the trainer refuses: a bad workload of the user's own, overrides, or data.

    A known workload's overrides are left to the trainer where the app's environment has no torch.
    """
    manifest = p.dataset_manifest if p.workload != PROGRAM else ""
    if is_own(p.workload) or manifest or (p.overrides and find_spec("torch")):
        described(p.workload, p.recipe, p.overrides, p.source, manifest)


def _check_image(name: str) -> None:
    """Refuse the Deep Learning AMIs that could not boot, as far as their names show it."""
    refuse_unless(
        "amazon-linux" not in name,
        f"pytorch_ami_parameter is {name!r}; the root device of Amazon Linux is not "
        f"{ROOT_DEVICE_NAME}: use one of Ubuntu {MIN_UBUNTU} or newer",
    )
    release = re.search(r"ubuntu-(\d+\.\d+)", name)
    refuse_unless(
        release is None or float(release[1]) >= MIN_UBUNTU,
        f"pytorch_ami_parameter is {name!r}; the Python of that release is too old to boot with: "
        f"use one of Ubuntu {MIN_UBUNTU} or newer",
    )


def check_size(p: ParameterFields) -> None:
    """Refuse a size that the AMI cannot train on."""
    instance = catalogue.find(p.size)
    refuse_unless(
        instance.num_gpus > 0,
        f"size {p.size} has no NVIDIA GPU of its own; the smallest with one is g4dn.xlarge",
    )
    refuse_unless(
        instance.is_trainable,
        f"size {p.size} has an {instance.gpu}, which PyTorch no longer supports; use g4dn or newer",
    )
    refuse_unless(
        not instance.needs_own_image or catalogue.NOTED_IMAGE not in p.pytorch_ami_parameter,
        f"size {p.size} is not among the sizes of the default image's release note; name an image "
        "that supports it with -c pytorch_ami_parameter=ami-..., or use one of g6e",
    )
    refuse_unless(
        instance.on_demand_usd_per_hour is not None,
        f"size {p.size} has no price in the catalogue, so no cost can be predicted; "
        "add it to sizing/catalogue/instances.csv",
    )


def check_volumes(p: ParameterFields) -> None:
    """Refuse volumes that gp3 does not offer, the size cannot use or the dataset does not fit."""
    rate = p.root_volume.initialization_mib_per_second
    refuse_unless(
        rate in (0, *EBS_INITIALIZATION_MIB_PER_SECOND),
        f"root_volume.initialization_mib_per_second is {rate}; use "
        f"{EBS_INITIALIZATION_MIB_PER_SECOND[0]} to {EBS_INITIALIZATION_MIB_PER_SECOND[-1]}, or 0 "
        "for the default rate, which costs nothing",
    )
    needed = math.ceil(round(p.dataset_gib * VOLUME_PER_DATASET, 6))
    refuse_unless(
        p.data_on in DATA_PLACES, f"data_on is {p.data_on!r}; use {' or '.join(DATA_PLACES)}"
    )
    if p.data_on == "nvme":
        _check_instance_store(p, needed)
        return
    refuse_unless(
        p.data_volume.gib >= needed,
        f"data_volume.gib is {p.data_volume.gib}; the dataset has {p.dataset_gib:.1f} GiB and "
        f"needs free space on top: use {needed} or more",
    )
    _check_speed(p)


def _check_instance_store(p: ParameterFields, needed_gib: int) -> None:
    without = [size for size in p.sizes if not catalogue.find(size).instance_store_gb]
    refuse_unless(
        not without,
        f"data_on is 'nvme', and {', '.join(without)} has no instance store; use ebs, or another "
        "size",
    )
    refuse_unless(
        p.data_gib >= needed_gib,
        f"data_on is 'nvme', and the smallest instance store of {', '.join(p.sizes)} has "
        f"{p.data_gib} GiB; the dataset has {p.dataset_gib:.1f} GiB and needs {needed_gib}: use "
        "ebs, or a larger size",
    )


def _check_speed(p: ParameterFields) -> None:
    instance = catalogue.find(p.size)
    useful = int(instance.ebs_max_mb_per_second * 1e6 / 2**20)
    useful = min(max(useful, GP3_MIN_MIB_PER_SECOND), GP3_MAX_MIB_PER_SECOND)
    refuse_unless(
        GP3_MIN_MIB_PER_SECOND <= p.data_volume.mib_per_second <= useful,
        f"data_volume.mib_per_second is {p.data_volume.mib_per_second}; "
        f"use {GP3_MIN_MIB_PER_SECOND} to {useful}, the most that {p.size} can use",
    )
    useful = min(max(instance.ebs_max_iops, GP3_MIN_IOPS), GP3_MAX_IOPS)
    refuse_unless(
        GP3_MIN_IOPS <= p.data_volume.iops <= useful,
        f"data_volume.iops is {p.data_volume.iops}; use {GP3_MIN_IOPS} to {useful}, the most that "
        f"{p.size} can use",
    )
    # The baseline IOPS come with a volume of any size.
    gib = 1 if p.data_volume.iops == GP3_MIN_IOPS else p.data_volume.iops / GP3_MAX_IOPS_PER_GIB
    refuse_unless(
        p.data_volume.gib >= gib,
        f"data_volume.gib is {p.data_volume.gib}; {p.data_volume.iops} IOPS need "
        f"{math.ceil(gib)} or more, or use less data_volume.mib_per_second",
    )
    needed = p.data_volume.mib_per_second * GP3_IOPS_PER_MIB_PER_SECOND
    refuse_unless(
        p.data_volume.iops >= needed,
        f"data_volume.iops is {p.data_volume.iops}; {p.data_volume.mib_per_second} MiB/s need "
        f"{needed}",
    )


def check_fleet(p: ParameterFields) -> None:
    """Refuse an unknown kind of fleet, and a base beyond its capacity."""
    refuse_unless(p.fleet in FLEETS, f"fleet is {p.fleet!r}; use {' or '.join(FLEETS)}")
    refuse_unless(
        0 <= p.on_demand_base <= p.target_capacity,
        f"on_demand_base is {p.on_demand_base}; use 0 to {p.target_capacity}, "
        "because the base is part of target_capacity",
    )
    apart = "a program" if p.program else ""
    apart = next((each for each in p.overrides if each in _BY_RANKS), apart)
    refuse_unless(
        not (p.mix_gpu_counts and apart),
        f"mix_gpu_counts is true, but the result of {apart} may depend on the number of GPUs; use "
        "false",
    )


def check_times(p: ParameterFields) -> None:
    """Refuse times that would stop a healthy run or never stop a hung one."""
    for name, text in p.train.items():
        try:
            check_option(name, text)
        except UserError as error:
            raise ValueError(f"train.{error}") from error
    needed = p.dataset_wait_seconds + BOOT_ALLOWANCE_SECONDS
    patience = p.guard.heartbeat_timeout_seconds
    refuse_unless(
        patience >= needed,
        f"guard.heartbeat_timeout_seconds is {patience}; use {needed} or more: the instance may "
        f"wait {p.dataset_wait_seconds} s for its dataset before the first heartbeat",
    )


def check_alarms(p: ParameterFields) -> None:
    """Refuse alarms that never or always fire, and an invalid e-mail address."""
    if p.alarm.email:
        advice = "use one address like you@example.org, or nothing"
        check_match("alarm.email", p.alarm.email, _EMAIL, advice)
    for name in ("gpu_utilization_percent", "gpu_memory_percent", "disk_percent"):
        value = getattr(p.alarm, name)
        refuse_unless(0 < value < 100, f"alarm.{name} is {value:g}; use more than 0, less than 100")
    interval = parse_interval(p.trainer_option("checkpoint_interval"))
    healthy = max(600, math.ceil(2 * interval.value) if interval.unit == "s" else 0)
    refuse_unless(
        healthy <= p.alarm.commit_seconds <= 86_400,
        f"alarm.commit_seconds is {p.alarm.commit_seconds}; use {healthy} to 86400: twice the "
        "checkpoint interval and ten minutes are healthy",
    )


def check_budget(p: ParameterFields) -> None:
    """Refuse half a budget, and what no key in S3 or no date could name."""
    name, usd, period = p.budget.name, p.budget.usd, p.budget.period
    check_match("budget.name", name or "none", _NAME, "use a letter, then letters, digits, - and _")
    refuse_unless(
        bool(name) == bool(usd) and period in PERIODS,
        f"the budget is {name!r}, {usd:g} dollars a {period!r}; set budget.name and budget.usd, or "
        f"neither, and as budget.period {', '.join(PERIODS)}",
    )


def check_name(p: ParameterFields) -> None:
    """Refuse a name or a prefix that a stack cannot have."""
    advice = "use a letter, then letters, digits and - (40)"
    if p.name:
        check_match("name", p.name, _STACK, advice)
    if p.prefix:
        check_match("prefix", p.prefix, _STACK_PREFIX, f"{advice}, not beginning with aws or ssm")


def check_sweep(p: ParameterFields) -> None:
    """Refuse shares that Batch would refuse, and a repository that ECR cannot have."""
    for share in p.sweep.shares:
        advice = "use a name of letters and digits and its parts, 0.001 to 10000, as in vision=3"
        check_match("sweep.shares", share, _SHARE, advice)
        # Batch's weight is the reciprocal.
        parts = float(share.partition("=")[2])
        is_fine = parts and aws_limits()["share-weight"].takes(1 / parts)
        refuse_unless(is_fine, f"sweep.shares has {share!r}; {advice}")
    names = [share.partition("=")[0] for share in p.sweep.shares]
    refuse_unless(
        len(names) <= most("shares-of-a-policy"),
        f"sweep.shares are {len(names)}; Batch takes {most('shares-of-a-policy')}",
    )
    _check_distinct("sweep.shares", p.sweep.shares, names)
    advice = "use a name such as training or team/training"
    check_match("sweep.repository", p.sweep.repository, _IMAGE_REPOSITORY, advice)


def check_network(p: ParameterFields) -> None:
    """Refuse half of an existing network, and zones that its subnets decide."""
    if not (p.vpc or p.subnets):
        return
    refuse_unless(
        p.vpc,
        f"subnets are {', '.join(p.subnets)}, but vpc is empty; add vpc=vpc-..., or drop them",
    )
    refuse_unless(
        p.subnets, f"vpc is {p.vpc!r} without subnets; add subnets=subnet-..., its private ones"
    )
    check_match("vpc", p.vpc, _VPC, "use an id like vpc-0123456789abcdef0, or nothing")
    for subnet in p.subnets:
        check_match("subnets", subnet, _SUBNET, "use ids like subnet-0123456789abcdef0")
    _check_distinct("subnets", p.subnets)
    pools, takes = len(p.subnets) * len(p.sizes), most("fleet-pools")
    refuse_unless(
        pools <= takes,
        f"{len(p.subnets)} subnets with {len(p.sizes)} sizes each are {pools} Spot capacity pools, "
        f"and a fleet takes {takes}; name fewer subnets",
    )
    refuse_unless(
        not p.zones, f"zones are {', '.join(p.zones)}, but the subnets decide them; drop zones"
    )


def check_tags(p: ParameterFields) -> None:
    """Refuse tags that EC2, S3 or IAM would refuse mid-deploy, and the stack's own."""
    for key, value in p.tags.items():
        refuse_unless(
            not key.lower().startswith("aws:"), f"tags.{key} begins with aws:, which AWS reserves"
        )
        refuse_unless(
            key.lower() not in map(str.lower, OUR_TAGS),
            f"tags.{key} is the stack's own, also in other letter cases; use another key",
        )
        advice = f"use 1 to {_MAX_KEY} letters, digits, spaces and _.:/=+@-"
        refuse_unless(_TAG_KEY.fullmatch(key), f"the tag's key is {key!r}; {advice}")
        advice = f"use at most {_MAX_VALUE} letters, digits, spaces and _.:/=+@-"
        check_match(f"tags.{key}", value, _TAG_VALUE, advice)
    refuse_unless(
        len(p.tags) <= _MAX_TAGS,
        f"{len(p.tags)} tags are given; a resource takes {_MAX_TAGS} besides {', '.join(OUR_TAGS)}",
    )
    # IAM takes keys that differ by case only for one.
    _check_distinct("tags", [*p.tags], [key.lower() for key in p.tags])


def check_kept(p: ParameterFields) -> None:
    """Refuse protection of the buckets that this deployment cannot provide."""
    if p.kms and p.kms != NEW_KEY:
        check_match("kms", p.kms, _KEY, f"use {NEW_KEY}, the ARN of a key, or nothing")
    refuse_unless(
        not p.run_bucket or p.versions_kept_days == defaults()["versions_kept_days"],
        f"versions_kept_days is {p.versions_kept_days}, but nothing here manages {p.run_bucket}; "
        "give it a lifecycle rule (docs/security.md), and drop versions_kept_days",
    )
    if not (p.dataset_bucket and p.run_bucket):
        return
    refuse_unless(
        p.kms != NEW_KEY,
        f"kms is {NEW_KEY}, which would create the key in DatasetStack, but with both buckets "
        "adopted that stack does not exist; use the ARN of a key",
    )
    refuse_unless(
        not p.access_logs,
        "access_logs is true, but both buckets are adopted; enable logging where they are "
        "managed, and drop access_logs",
    )


def check_review(p: ParameterFields) -> None:
    """Refuse only one of ReviewStack's two parameters, or trust in more than one repository."""
    given = {"oidc_provider": p.review.oidc_provider, "repository": p.review.repository}
    if not any(given.values()):
        return
    missing = [f"review.{name}" for name, value in given.items() if not value]
    refuse_unless(
        not missing,
        f"{''.join(missing)} is missing; set both of ReviewStack's parameters or neither",
    )
    advice = "use arn:aws:iam::ACCOUNT:oidc-provider/token.actions.githubusercontent.com"
    check_match("review.oidc_provider", p.review.oidc_provider, _OIDC_PROVIDER, advice)
    advice = "use OWNER/NAME, or OWNER@ID/NAME@ID, which a repository made since July 2026 needs"
    check_match("review.repository", p.review.repository, _REPOSITORY, advice)
