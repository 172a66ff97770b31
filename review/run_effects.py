"""The effects of a deploy on a run in progress, on its next machine, and on their image.

One fleet is one run; the run follows the config.json of its first attempt. AWS's documents disagree
on whether a new version of the launch template replaces the fleet (docs/deploy.md).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from contract.run_env import Name
from review.assembly import GROUP, SPOT_FLEET, Side, StackSide, variables_of
from review.changes import Change
from review.spelling import as_list, number, short, spell
from sizing import catalogue

# The first attempt wrote these into config.json: a replacement refuses another value by name.
_FIXED_BY_THE_RUN: tuple[Name, ...] = ("WORKLOAD", "RECIPE", "OVERRIDES")
# Where run.env names a bucket, and what of a run is there.
_CONTENTS: Mapping[Name, str] = {
    "RUN_URI": "a run's checkpoints are in the old bucket, and its next attempt finds none of them",
    "DATASET_URI": "the dataset is in the old bucket, and the next attempt does not find it",
}
_GONE = ("replaced", "removed")
# Resources in use by a running instance: CloudFormation cannot delete the old one.
_HELD = ("AWS::EC2::Subnet", "AWS::EC2::VPC", "AWS::EC2::SecurityGroup")
# The Guard's limits and how each is worded; 0 dollars or hours of waiting mean no limit.
_SPELLED = {
    "MAX_BILLED_HOURS": "{} billed hours",
    "MAX_USD": "${}",
    "BUDGET_USD": "${} of all runs of its budget",
    "MAX_WAIT_HOURS": "{} hours without a machine",
    "HEARTBEAT_TIMEOUT_SECONDS": "{} s without a heartbeat",
    "MAX_BARREN_ATTEMPTS": "{} attempts in a row that commit nothing",
}
_NONE = "0"
_DEADLINE = "DEADLINE_HOURS"
_HERE_DOCUMENT = re.compile(r"run\.env\" <<'(\w+)'\n(.*?)\n\1\n(.*)", re.DOTALL)
# Cancelling a fleet terminates its instances as TerminateInstances does.
_SHUT_DOWN = (
    "shut down without a Spot notice: it saves and releases the lease, and keeps its role until it "
    "is off"
)
# What an update of a fleet at zero does.
_AGAIN = {
    SPOT_FLEET: "A fleet that a finished run has sent to zero is set to its capacity again: one "
    "instance boots, sees that the run is finished and sends the fleet back to zero.",
    GROUP: "A fleet at zero is as new after it: unless its run has ended, the Guard requests a "
    "machine again.",
}
_SSM = "Session Manager, S3 and the trainer's commits fail at once"


def find_run_effects(base: Side, head: Side, changes: Sequence[Change]) -> list[str]:
    """Return sentences, the most important first; none if no run is affected."""
    found = [
        sentence
        for change in changes
        if change.type == "AWS::S3::Bucket"
        for sentence in _bucket_effects(change, base)
    ]
    for name in sorted(head.stacks.keys() & base.stacks.keys()):
        own = [change for change in changes if change.stack == name]
        found += _of_stack(base.stacks[name], head.stacks[name], own)
    return [*found, *_image_effects(base, head)]


def _bucket_effects(change: Change, base: Side) -> Iterator[str]:
    """Yield the effects of a bucket that is removed."""
    if change.action in _GONE:
        for name, content in _CONTENTS.items():
            uris = (read_run_env(stack).get(name, "") for stack in base.stacks.values())
            if any(change.logical_id in uri for uri in uris):
                yield f"**{change.path} is {change.action}**: {content}."


def _of_stack(base: StackSide, head: StackSide, changes: Sequence[Change]) -> Iterator[str]:
    fleets = [change for change in changes if _is_fleet(change)]
    old, new = read_run_env(base), read_run_env(head)
    is_new_run = old.get("RUN_ID") != new.get("RUN_ID")
    kinds = {fleet.type for fleet in fleets}
    for fleet in fleets:
        if len(kinds) == 1:
            yield from _fleet_effects(fleet, old, new, is_new_run)
        elif fleet.action == "removed":
            yield (
                "**The kind of fleet changes**: a new one starts its machine, then that of "
                f"{fleet.path} is {_SHUT_DOWN}. The new one resumes from there."
            )
    for type_name in {each.type for each in fleets if each.action not in _GONE and _requests(each)}:
        # An update sends TargetCapacity again, and a new fleet has it from the start.
        yield _AGAIN[type_name]
        if has_deadline(head) and type_name == SPOT_FLEET:
            yield (
                "If the Guard has bought on-demand capacity for the deadline, the update sets the "
                "fleet back to Spot; the Guard decides again within ten minutes."
            )
    is_new_version = any(
        each.type == "AWS::EC2::LaunchTemplate" and each.action == "changed" for each in changes
    )
    if is_new_version and not fleets and head.of_type(GROUP):
        yield (
            "The fleet takes the launch template's new version in place: the running instance is "
            f"left alone, and the next one starts from it. {_AGAIN[GROUP]}"
        )
    if not is_new_run and not any(fleet.action == "removed" for fleet in fleets):
        yield from _next_attempt(base, head, old, new)
    for queue in changes:
        if queue.type == "AWS::Batch::JobQueue" and queue.action in _GONE:
            yield (
                f"**The queue {queue.path} is {queue.action}, and Batch ends its jobs**: before "
                "the deploy, `runs stop` each sweep, which saves; after it, `runs resume`."
            )
    keys = [_key(side) for side in (base, head)]
    if keys[0] and keys[1] != keys[0]:
        yield (
            f"**The data's key changes** ({keys[0]} → {keys[1] or 'none'}): dataset and "
            "checkpoints stay encrypted under the old one, which the machines may no longer use: "
            "their next attempt can read neither. Keep kms until the run has ended, and upload "
            "the dataset again."
        )
    yield from _surroundings(changes, is_new_run)
    yield from _orphans(head)


def _fleet_effects(
    fleet: Change, old: dict[Name, str], new: dict[Name, str], is_new_run: bool
) -> Iterator[str]:
    if fleet.action == "removed":
        yield (
            f"**The fleet {fleet.path} is removed**: its instance is {_SHUT_DOWN}. The run can "
            "resume later under the same run_id."
        )
    elif fleet.action == "replaced" and is_new_run:
        yield (
            f"**A new run starts, and the deploy ends {old.get('RUN_ID')}** if it still trains: "
            f"{new.get('RUN_ID')} gets a new fleet, then the old one's instance is {_SHUT_DOWN}. "
            f"To let it train on, deploy with -c run_id={old.get('RUN_ID')}; later, that also "
            "resumes it from its last commit."
        )
    elif fleet.action in ("replaced", "may be replaced"):
        is_sure = fleet.action == "replaced"
        yield (
            f"**The fleet {'is' if is_sure else 'may be'} replaced** ({fleet.why}): two instances "
            "of the same run are then up for a while, and both are billed; the lease lets only one "
            f"of them write. The old one is {_SHUT_DOWN}, and the new one resumes from there."
        )
    if fleet.action == "may be replaced":
        yield (
            "If the fleet is updated in place instead, the running instance is left alone, and the "
            "next one (after an interruption) starts from the new launch template."
        )
    if fleet.action in ("changed", "may be replaced"):
        for path, before, after in fleet.differences():
            if path.endswith(".TargetCapacity") and after == 0:
                yield "**The fleet goes to zero**: a running instance gets a Spot notice and saves."
            elif path == "MaxSize" and str(after) == "0":
                yield f"**The fleet goes to zero**: a running instance is {_SHUT_DOWN}."
            elif path.endswith("TargetCapacity"):
                yield f"{path.rpartition('.')[2]} changes from {short(before)} to {short(after)}."


def _is_fleet(change: Change) -> bool:
    """Whether it is a stack's fleet: of two groups, that on Spot speaks for both."""
    return change.type == SPOT_FLEET or (change.type == GROUP and change.path.endswith("/Spot"))


def _requests(fleet: Change) -> bool:
    """Whether the deploy makes the fleet request its machine."""
    config = fleet.new_properties.get("SpotFleetRequestConfigData") or {}
    return bool(config.get("TargetCapacity") or number(fleet.new_properties.get("MaxSize")))


def _next_attempt(
    base: StackSide, head: StackSide, old: dict[Name, str], new: dict[Name, str]
) -> Iterator[str]:
    """Yield what the next attempt of the same run will find."""
    run_id = new.get("RUN_ID", "")
    for name in _FIXED_BY_THE_RUN:
        if old.get(name) != new.get(name):
            yield (
                f"**{name} changes under the same run id {run_id}** ({old.get(name) or '-'} → "
                f"{new.get(name) or '-'}): the next attempt of a run that has started refuses it. "
                "Use a new run_id."
            )
    if old.get("DATASET_URI") != new.get("DATASET_URI"):
        yield (
            f"The next attempt of {run_id} reads another dataset ({new.get('DATASET_URI', '-')}); "
            "if its content differs, that is another run: use a new run_id."
        )
    if old.get("RUN_URI") != new.get("RUN_URI"):
        yield (
            f"**The location of {run_id} changes** ({old.get('RUN_URI', '-')} → "
            f"{new.get('RUN_URI', '-')}): its checkpoints are not found there, and it "
            "restarts from scratch."
        )
    if old.get("BUNDLE_URI") != new.get("BUNDLE_URI"):
        yield (
            "The code bundle changes: a run that has started continues with the bundle that its "
            "config.json names; only a new run uses this one."
        )
    if _parts(base)[1] != _parts(head)[1]:
        yield "The boot script changes for the next instance."
    yield from _numerics(base, head)


def _numerics(base: StackSide, head: StackSide) -> Iterator[str]:
    old, new = _gpus(base), _gpus(head)
    if not (old and new):
        return
    if old != new:
        change = f"GPUs change from {old} to {new}"
        if old.partition(" x ")[2] == new.partition(" x ")[2]:
            yield (
                f"{change}: a workload's weights stay equal bit for bit, unless its sums depend on "
                "the number of ranks (reduction=ring, sharding=full); a program's may differ."
            )
        else:
            yield (
                f"**{change}**: the numerics key of the run changes, so its weights no longer "
                "equal an uninterrupted run's bit for bit; the receipt says so."
            )
    elif more := sorted(_gpus_of_fleet(head) - _gpus_of_fleet(base)):
        yield (
            f"**The fleet may start {', '.join(more)} as well**: on a machine with another GPU the "
            "numerics key of the run changes; the receipt says so."
        )


def _orphans(head: StackSide) -> Iterator[str]:
    for data in head.launch_templates:
        for disk in as_list(data.get("BlockDeviceMappings")):
            # EC2 keeps every volume but the root by default.
            if disk.get("Ebs") and disk["Ebs"].get("DeleteOnTermination") is not True:
                yield (
                    f"**Each terminated instance leaves its volume {disk.get('DeviceName')} "
                    "behind**, which is billed until someone deletes it: set DeleteOnTermination."
                )


def _gpus_of_fleet(side: StackSide) -> set[str]:
    return {
        known.gpu
        for size in (side.fleet.sizes if side.fleet else ())
        if (known := catalogue.instances().get(size))
    }


def _key(side: StackSide) -> str:
    """Return the key of the machines' volumes, which is also the buckets'."""
    for data in side.launch_templates:
        if disks := as_list(data.get("BlockDeviceMappings")):
            return spell((disks[0].get("Ebs") or {}).get("KmsKeyId", ""))
    return ""


def _gpus(side: StackSide) -> str:
    size = str(next(iter(side.launch_templates), {}).get("InstanceType", ""))
    known = catalogue.instances().get(size)
    return f"{known.num_gpus} x {known.gpu}" if known else size


def _surroundings(changes: Sequence[Change], is_new_run: bool) -> Iterator[str]:
    for change in changes:
        # A run's role and security group go with its fleet.
        if is_new_run and change.action == "removed":
            continue
        if change.type in _HELD and change.action in _GONE:
            yield (
                f"**{change.path} is {change.action}** while a running instance is in it: "
                "CloudFormation cannot delete the old one until it terminates. Set the fleet "
                "to zero first (-c target_capacity=0)."
            )
        is_instances = re.search(r"InstanceRole|InstanceProfile", change.path)
        if change.type == "AWS::IAM::Role" and is_instances and change.action in _GONE:
            yield f"**The instance role is {change.action}** under a running trainer: {_SSM}."
        elif change.type == "AWS::IAM::Policy" and is_instances and change.action != "added":
            yield "The instance role's policy changes for the running trainer too, at once."
        elif change.type == "AWS::Lambda::Function" and change.action == "changed":
            yield f"{change.path.partition('/')[0]} uses the new code and settings at once."
            yield from _limit_effects(change)


def _limit_effects(change: Change) -> Iterator[str]:
    """Yield a sentence for each limit that a changed Guard gets; none for another function."""
    old, new = variables_of(change.old_properties), variables_of(change.new_properties)
    for name, spelling in _SPELLED.items():
        before, after = old.get(name, _NONE), new.get(name, _NONE)
        if before == after:
            continue
        was, text = spelling.format(before), f"The Guard stops the run at {spelling.format(after)}"
        if after == _NONE:
            yield f"**A limit is removed**: the Guard no longer stops the run at {was}."
        elif before == _NONE:
            yield f"{text} now; there was no such limit. What the run has used so far counts."
        elif number(after) < number(before):
            yield (
                f"**{text}, no longer {was}**: a run that has used more goes to "
                "zero within ten minutes. It saves, and a deploy with a higher limit resumes it."
            )
        else:
            yield f"{text}, no longer {was}; what the run has used so far counts."
    yield from _deadline_effects(old.get(_DEADLINE, _NONE), new.get(_DEADLINE, _NONE))


def has_deadline(stack: StackSide) -> bool:
    """Whether the stack's Guard buys on-demand capacity to meet a deadline."""
    functions = stack.of_type("AWS::Lambda::Function")
    return any(variables_of(each).get(_DEADLINE, _NONE) != _NONE for each in functions)


def _deadline_effects(before: str, after: str) -> Iterator[str]:
    if before == after:
        return
    if after == _NONE:
        yield (
            f"**The deadline of {before} hours is removed**: the Guard requests what the template "
            "specifies. An on-demand instance that it bought trains until Spot takes over."
        )
    elif before == _NONE:
        yield (
            f"**The run gets a deadline, {after} hours after its start**: if Spot puts it in "
            "danger, the Guard buys an on-demand instance. The move comes as a notice to the "
            "trainer, which saves and resumes there."
        )
    else:
        yield (
            f"The deadline moves from {before} to {after} hours after the run's start: the Guard "
            "decides again between Spot and on demand within ten minutes."
        )


def read_run_env(stack: StackSide) -> dict[Name, str]:
    """Return run.env's variables from the launch template, none if there is no run.env."""
    return _parts(stack)[0]


def _parts(stack: StackSide) -> tuple[dict[Name, str], str]:
    """Return run.env's variables, and what the user data runs after writing run.env."""
    for data in stack.launch_templates:
        found = _HERE_DOCUMENT.search(spell(data.get("UserData", "")))
        if found:
            lines = [line.partition("=") for line in found.group(2).splitlines()]
            variables = {cast(Name, name): value.strip('"') for name, _, value in lines}
            return _bundle(stack) | variables, found.group(3)
    return {}, ""


def _bundle(stack: StackSide) -> dict[Name, str]:
    """Return what the first boot adds to run.env: the value of the stack's parameter."""
    for each in stack.of_type("AWS::SSM::Parameter"):
        if str(each.get("Name")).endswith("/bundle-uri"):
            return {"BUNDLE_URI": spell(each["Value"])}
    return {}


def image_notes(base: Side, head: Side) -> Iterator[str]:
    """Yield a sentence for each training stack."""
    for name, had, starts in _images(base, head):
        if had == starts:
            yield f"{name} starts the image that it has: {_spelled(starts, base, head)}."
        else:
            has = f"; it has {_spelled(had, base, head)}" if had else ""
            yield f"{name} starts {_spelled(starts, base, head)}{has}."


def certificate_notes(base: Side, head: Side) -> Iterator[str]:
    """Yield what is certified of each program, and what was."""
    for name, stack in sorted(head.stacks.items()):
        before = base.stacks[name].certificate if name in base.stacks else ""
        was = f" Before: {before}." if before not in ("", stack.certificate) else ""
        if stack.certificate:
            yield f"The program of {name}: {stack.certificate}.{was}"


def _image_effects(base: Side, head: Side) -> Iterator[str]:
    """Yield a sentence for each run that may go on with another image."""
    for name, had, starts in _images(base, head):
        run = read_run_env(head.stacks[name]).get("RUN_ID")
        if had in ("", starts) or run != read_run_env(base.stacks[name]).get("RUN_ID"):
            continue
        verb = "changes" if _is_id(starts) else "may change"
        keep = "`make doctor` prints the command that keeps it"
        yield (
            f"**The image of {run} {verb}** ({_spelled(had, base, head)} → "
            f"{_spelled(starts, base, head)}): with another torch, CUDA or driver the numerics key "
            "changes; the receipt says so. "
            f"{f'-c pytorch_ami_parameter={had} keeps it' if _is_id(had) else keep}."
        )


def _images(base: Side, head: Side) -> Iterator[tuple[str, str, str]]:
    """Yield each training stack with the image that it has, if any, and the one that it starts.

    Templates name the stack that keeps a run's image; only what is deployed has its id.
    """
    for name, stack in sorted(head.stacks.items()):
        if wanted := _wanted(stack):
            old, keeper = base.stacks.get(name), base.stacks.get(wanted)
            had = (old.image or _wanted(old)) if old else ""
            yield name, had, (keeper and keeper.image) or wanted


def _wanted(stack: StackSide) -> str:
    """Return the image's id, the stack that keeps it, or the parameter that names the newest."""
    image = next(iter(stack.launch_templates), {}).get("ImageId", "")
    if isinstance(image, dict) and "Ref" in image:
        image = stack.template.get("Parameters", {}).get(image["Ref"], {}).get("Default")
    return spell(image.get("Fn::ImportValue", image) if isinstance(image, dict) else image)


def _is_id(image: str) -> bool:
    return image.startswith("ami-")


def _spelled(image: str, base: Side, head: Side) -> str:
    if image in base.stacks:
        return f"the one that {image} keeps"
    if image not in head.stacks:
        return image if _is_id(image) else f"the newest of {image}"
    (keeper,) = head.stacks[image].resources.values()
    return f"the newest of {str(keeper['Properties']['Value'])[14:-2]}, which {image} then keeps"
