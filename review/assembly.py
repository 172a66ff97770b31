"""The two sides to compare, and how the CDK CLI sees the difference.

A side is a cloud assembly, or the deployed templates. The base is synthesized from its own code, in
a git worktree in a temporary folder.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from contract.aws_errors import SettingsError, checked, explain, settings_checked
from contract.stack_names import image_of
from embedded_aws import load_template
from review.spelling import as_list, number
from sizing import PRICE_REGION

# Besides the stacks' code, these packages decide what a template contains; in another app, also
# the wheel of the stacks, by its name, its file or a commit.
_SYNTH_PACKAGES = re.compile(
    r'(?:aws-cdk[\w.-]*|constructs|cdk-nag|jsii)==[^\s",]+|.*(?:training[-_]stack|git\+|\.whl).*'
)
_ENVIRONMENT_FOLDERS = (".venv", "node_modules")
# What docs/importing.md does where there is no `make setup`.
_SET_UP = (
    "if grep -qs ^setup: Makefile; then make setup; else "
    "npm ci && python3 -m venv .venv && .venv/bin/pip install -r requirements.txt; fi"
)
_DESTRUCTIVE = re.compile(
    r"^  [^:\n]+: .*?(?P<logical_id>\w+) (?P<impact>(?:will|may) be \w+)", re.MULTILINE
)


# How the annotation ends that stacks/plan_at_synth.py makes.
_OF_CERTIFICATE = " [ack: plan:certificate]"
# What the Guard and the machines set of a fleet, of either kind.
_SET_BY_THE_GUARD = re.compile(r"TargetCapacity$|/(M(ax|in)Size|Overrides|VPCZoneIdentifier)\b")
# CloudFormation reads one resource after another.
_DRIFT_SECONDS = 120


class CannotReview(ValueError):
    """One side is not available; the message says which and why."""


NESTED = "AWS::CloudFormation::Stack"
SPOT_FLEET, GROUP = "AWS::EC2::SpotFleet", "AWS::AutoScaling::AutoScalingGroup"
GUARD = "stacks.guard.handler.handler"  # the Handler of its function


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSide:
    """What a stack's fleet may start, of either kind (docs/fleets.md)."""

    sizes: tuple[str, ...] = ()
    subnets: tuple[Any, ...] = ()
    on_demand_base: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSide:
    """One stack of one side."""

    template: Mapping[str, Any]
    name: str = ""  # CloudFormation's
    construct_id: str = ""  # by which the CDK CLI selects it; of an assembly
    region: str = PRICE_REGION  # whose prices count
    is_protected: bool = False
    # sizing's prediction, if the app writes one at synthesis.
    plan: Mapping[str, Any] | None = None
    certificate: str = ""  # what synth says of a program's
    image: str = ""  # of a deployed stack
    drift: str = ""  # how what is deployed differs from its template
    nested: Mapping[str, Any] = field(default_factory=dict)  # resources of its nested stacks

    @property
    def resources(self) -> Mapping[str, Any]:
        return {**(self.template.get("Resources") or {}), **self.nested}

    def of_type(self, name: str) -> list[Mapping[str, Any]]:
        """Return the properties of each resource of a type."""
        found = (each for each in self.resources.values() if each["Type"] == name)
        return [each.get("Properties") or {} for each in found]

    @property
    def fleet(self) -> FleetSide | None:
        """Its fleet, if it has one."""
        for each in self.of_type(SPOT_FLEET):
            config = each.get("SpotFleetRequestConfigData", {})
            launches = as_list(config.get("LaunchTemplateConfigs"))
            tried = [it for launch in launches for it in as_list(launch.get("Overrides"))]
            return FleetSide(
                sizes=_sizes(tried),
                subnets=tuple(each.get("SubnetId", "") for each in tried),
                on_demand_base=int(number(config.get("OnDemandTargetCapacity"))),
            )
        for each in self.of_type(GROUP):
            launch = (each.get("MixedInstancesPolicy") or {}).get("LaunchTemplate") or {}
            guards = [variables_of(one) for one in self.of_type("AWS::Lambda::Function")]
            bases = [int(number(one.get("ON_DEMAND_BASE"))) for one in guards]
            return FleetSide(
                sizes=_sizes(as_list(launch.get("Overrides"))),
                subnets=tuple(as_list(each.get("VPCZoneIdentifier"))),
                on_demand_base=max(bases, default=0),
            )
        return None

    @property
    def launch_templates(self) -> list[Mapping[str, Any]]:
        """The data of each launch template."""
        found = self.of_type("AWS::EC2::LaunchTemplate")
        return [each.get("LaunchTemplateData", {}) for each in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """All stacks of one side: those of a cloud assembly, or the deployed ones."""

    name: str
    stacks: Mapping[str, StackSide]
    others: Mapping[str, str | None] = field(default_factory=dict)  # descriptions of other stacks
    is_deployed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CdkDiff:
    """The output of `cdk diff`, and by logical id the changes that it calls destructive."""

    stack: str
    text: str
    destructive: Mapping[str, str]


def _sizes(overrides: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return what overrides name; those with requirements name none."""
    return tuple(dict.fromkeys(str(each.get("InstanceType", "?")) for each in overrides))


def variables_of(function: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the environment variables of a function's properties."""
    variables = (function.get("Environment") or {}).get("Variables")
    return variables if isinstance(variables, dict) else {}


def read_assembly(folder: Path, name: str, head: Side | None = None) -> Side:
    """Read a cloud assembly: each stack's template, its protection and its plan.

    Stages may give one name to stacks of several regions. One that `head` has is known as there.
    """
    found: list[StackSide] = []
    of_cli = _cli_region()
    for place, construct_id, artifact in _stacks_of(folder):
        properties = artifact["properties"]
        template = place / properties["templateFile"]
        stack_name = properties.get("stackName") or template.name.partition(".")[0]
        plan = template.with_name(template.name.replace(".template.", ".plan."))
        side = StackSide(
            template=json.loads(template.read_text(encoding="utf-8")),
            name=stack_name,
            construct_id=construct_id,
            region=artifact["environment"].rpartition("/")[2].replace("unknown-region", of_cli),
            is_protected=bool(properties.get("terminationProtection")),
            plan=json.loads(plan.read_text(encoding="utf-8")) if plan.exists() else None,
            certificate=_certificate(place, artifact),
        )
        side = replace(side, nested=_nested(place, side.resources))
        found.append(side)
    num = Counter(each.name for each in found)
    known = {(each.name, each.region): key for key, each in head.stacks.items()} if head else {}
    stacks = {
        known.get((each.name, each.region))
        or (each.name if num[each.name] == 1 else each.construct_id): each
        for each in found
    }
    return Side(name=name, stacks=stacks)


def _stacks_of(folder: Path) -> Iterator[tuple[Path, str, Mapping[str, Any]]]:
    """Yield an assembly's stacks, also those of CDK Stages, which are in folders of their own."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for construct_id, artifact in manifest["artifacts"].items():
        if artifact["type"] == "cdk:cloud-assembly":
            yield from _stacks_of(folder / artifact["properties"]["directoryName"])
        elif artifact["type"] == "aws:cloudformation:stack":
            yield folder, artifact.get("displayName", construct_id), artifact


def _nested(folder: Path, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the nested stacks among resources contain, under ids that begin with theirs."""
    found: dict[str, Any] = {}
    for name, each in resources.items():
        file = (each.get("Metadata") or {}).get("aws:asset:path")
        if each["Type"] == NESTED and file:
            text = (folder / file).read_text(encoding="utf-8")
            for inner in json.loads(text)["Resources"]:
                text = text.replace(f'"{inner}"', f'"{name}.{inner}"')
            inside = json.loads(text)["Resources"]
            found |= {**inside, **_nested(folder, inside)}
    return found


def _certificate(folder: Path, artifact: Mapping[str, Any]) -> str:
    """Return synth's annotation of a program's certificate; empty without one."""
    found = artifact.get("metadata") or {}
    if file := artifact.get("additionalMetadataFile"):
        found = json.loads((folder / file).read_text(encoding="utf-8"))
    texts = [str(each.get("data")) for entries in found.values() for each in entries]
    told = [text.removesuffix(_OF_CERTIFICATE) for text in texts if text.endswith(_OF_CERTIFICATE)]
    return told[0] if told else ""


def _cli_region() -> str:
    try:
        return _session().region_name or PRICE_REGION
    except BotoCoreError:  # AWS_PROFILE names none; only a comparison with AWS needs one
        return PRICE_REGION


def _session() -> boto3.session.Session:
    """Return a new session, as the default one keeps the credentials that it found first."""
    # The CDK CLI prefers AWS_REGION to AWS_DEFAULT_REGION.
    return boto3.session.Session(region_name=os.environ.get("AWS_REGION"))


def synthesize(checkout: Path, out: Path, context: Sequence[str], name: str) -> None:
    """Run the CDK CLI of `checkout` on its own app."""
    _require_app(checkout, name)
    command = ["npx", "--no-install", "cdk", "synth", "--quiet", "--no-notices", "--asset-metadata"]
    for item in context:
        if "=" not in item:
            raise CannotReview(f"-c {item} is not NAME=VALUE")
        command += ["-c", item]
    done = _run([*command, "--output", str(out)], checkout)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        shown = [line for line in lines if not re.match(r"npm warn|.*Subprocess exited", line)]
        errors = [line for line in shown if line.startswith("ERROR")]
        # The last line of a traceback says it; the frames above it are ours or CDK's.
        errors = errors or [line for line in shown if re.match(r"\w+(Error|Exception): ", line)]
        raise CannotReview(f"{name} does not synthesize:\n  " + "\n  ".join(errors or shown[-8:]))


def run_cdk_diff(
    repository: Path, head: Path, stack: str, construct_id: str, base: Mapping[str, Any] | None
) -> CdkDiff:
    """Compare `stack` of the assembly `head` with a template, or with what is deployed (None)."""
    command = ["npx", "--no-install", "cdk", "diff", "--app", str(head), "--exclusively"]
    command += [construct_id, "--fail-on", "destructive", "--no-color", "--ci", "--no-notices"]
    with tempfile.TemporaryDirectory(prefix="review-") as folder:
        if base is None:
            command += ["--method", "template"]
        else:
            file = Path(folder) / "base.template.json"
            file.write_text(json.dumps(base), encoding="utf-8")
            command += ["--template", str(file)]
        done = _run(command, repository)
    _, found, listed = done.stderr.partition("destructive change(s)")
    if done.returncode != 0 and not found:
        raise CannotReview(f"cdk diff of {stack} failed: {done.stderr.strip()[-600:]}")
    return CdkDiff(
        stack=stack,
        text=done.stdout.strip(),
        destructive={each["logical_id"]: each["impact"] for each in _DESTRUCTIVE.finditer(listed)},
    )


@contextmanager
def base_checkout(repository: Path, commit: str) -> Iterator[Path]:
    """Check `commit` out in a temporary folder, which is deleted afterwards.

    Yield the folder there that corresponds to `repository`, a repository or a folder inside one.
    """
    with tempfile.TemporaryDirectory(prefix="review-") as folder:
        worktree = Path(folder) / "base"
        _git(repository, "worktree", "add", "--quiet", "--detach", str(worktree), commit)
        try:
            prefix = Path(_git(repository, "rev-parse", "--show-prefix"))
            checkout = worktree / prefix
            _require_app(checkout, f"base ({commit[:9]})")
            if _synth_packages(repository) == _synth_packages(checkout):
                # In a repository of several apps, they may be in a folder above.
                for up, name in product(range(len(prefix.parts) + 1), _ENVIRONMENT_FOLDERS):
                    if (found := repository.joinpath(*[".."] * up, name)).exists():
                        checkout.joinpath(*[".."] * up, name).symlink_to(found.resolve())
            else:
                # With head's packages, the changes of an upgrade would not show.
                done = _run(["bash", "-c", _SET_UP], checkout)
                if done.returncode != 0:
                    raise CannotReview(
                        f"base pins other CDK packages, and their setup failed at {commit[:9]}: "
                        + done.stderr.strip()[-400:]
                    )
            yield checkout
        finally:
            _git(repository, "worktree", "remove", "--force", str(worktree))


def _require_app(folder: Path, name: str) -> None:
    if not (folder / "cdk.json").exists():
        raise CannotReview(f"{name} has no cdk.json here; run the review in a CDK app's folder")


def merge_base(repository: Path, revision: str) -> str:
    """Return the commit where the branch left `revision`; later commits there are not reviewed."""
    command = ["git", "rev-parse", "--verify", "-q", f"{revision}^{{commit}}"]
    if _run(command, repository).returncode:
        raise CannotReview(
            f"base {revision!r} is not a commit of this repository; use a branch, tag or commit "
            "(a shallow clone may lack it: git fetch --unshallow)"
        )
    return _git(repository, "merge-base", revision, "HEAD")


def head_name(repository: Path) -> str:
    """Return the name of the working tree in the comment."""
    commit = _git(repository, "rev-parse", "--short", "HEAD")
    is_dirty = _git(repository, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with uncommitted changes" if is_dirty else commit


def deployed(head: Side) -> Side:
    """Read head's stacks as they are deployed; needs cloudformation:GetTemplate, DescribeStacks."""
    stacks: dict[str, StackSide] = {}
    others: dict[str, Mapping[str, str | None]] = {}  # by region
    try:
        with settings_checked():
            session = checked(_session())
        for name, stack in sorted(head.stacks.items()):
            client = session.client("cloudformation", region_name=stack.region)
            own = {"StackName": stack.name or name}
            try:
                (described,) = client.describe_stacks(**own)["Stacks"]
                if described["StackStatus"] == "REVIEW_IN_PROGRESS":  # a change set, and no more
                    continue
                body = client.get_template(**own, TemplateStage="Original")["TemplateBody"]
            except ClientError as error:
                if "does not exist" in str(error):
                    others[stack.region] = others.get(stack.region) or _descriptions(client)
                    continue
                raise
            stacks[name] = StackSide(
                template=body if isinstance(body, Mapping) else load_template(body),
                region=stack.region,
                is_protected=bool(described.get("EnableTerminationProtection")),
                image=image_of(described),
                drift=_drift(client, described),
            )
    except (BotoCoreError, ClientError, SettingsError) as error:
        why = explain(error) or error
        raise CannotReview(f"the deployed stacks cannot be read: {why}") from error
    regions = ", ".join(sorted({each.region for each in head.stacks.values()}))
    return Side(name=f"what is deployed in {regions}", stacks=stacks, is_deployed=True,
                others={k: v for each in others.values() for k, v in each.items()})  # fmt: skip


def _drift(client: Any, stack: Mapping[str, Any]) -> str:
    """Return how a stack differs from its template; if we may not ask, what was found last."""
    name = {"StackName": stack["StackName"]}
    try:
        started = client.detect_stack_drift(**name)
        asked = {"StackDriftDetectionId": started["StackDriftDetectionId"]}
        for _ in range(_DRIFT_SECONDS):
            answer = client.describe_stack_drift_detection_status(**asked)
            if answer["DetectionStatus"] != "DETECTION_IN_PROGRESS":
                break
            time.sleep(1)
        wanted = ["MODIFIED", "DELETED"]
        found = client.describe_stack_resource_drifts(
            **name, StackResourceDriftStatusFilters=wanted
        )["StackResourceDrifts"]
    except ClientError:
        last = stack.get("DriftInformation") or {}
        day = f"{last.get('LastCheckTimestamp', '')}"[:10]
        return f"so CloudFormation found on {day}" * (last.get("StackDriftStatus") == "DRIFTED")
    return "; ".join(told for each in found for told in drift_of(each))


def drift_of(resource: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a resource differs from its template."""
    name = resource["LogicalResourceId"]
    if resource["StackResourceDriftStatus"] == "DELETED":
        yield f"{name} is gone"
    for each in resource.get("PropertyDifferences") or []:
        if not _SET_BY_THE_GUARD.search(each["PropertyPath"]):
            path = each["PropertyPath"].strip("/")
            yield f"{name}: {path} {each['ExpectedValue']} → {each['ActualValue']}"


def _descriptions(client: Any) -> dict[str, str | None]:
    """Return all stacks' descriptions; none to ReviewStack's role, which may not list stacks."""
    try:
        pages = list(client.get_paginator("describe_stacks").paginate())
    except ClientError as error:
        if error.response["Error"]["Code"] != "AccessDenied":
            raise
        return {}
    return {each["StackName"]: each.get("Description") for page in pages for each in page["Stacks"]}


def _synth_packages(checkout: Path) -> set[str]:
    files = [checkout / name for name in ("requirements.txt", "package.json")]
    text = "\n".join(each.read_text(encoding="utf-8") for each in files if each.exists())
    return {*_SYNTH_PACKAGES.findall(text.replace('": "', "=="))}


def _git(repository: Path, *arguments: str) -> str:
    done = _run(["git", *arguments], repository)
    if done.returncode != 0:
        raise CannotReview(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # A git hook or rebase that calls this sets variables that would point git at another tree.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # `python app.py` is that of the app's own environment, activated or not, also of one above.
    above = [folder, *folder.absolute().parents]
    top = next((number for number, each in enumerate(above) if (each / ".git").exists()), 0)
    own = [str(each / ".venv" / "bin") for each in above[: top + 1]]
    environment["PATH"] = os.pathsep.join([*own, environment["PATH"]])
    return subprocess.run(
        list(command), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
