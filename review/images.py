"""Which image a deploy starts, and which is deployed: an id, the one a run keeps, or the newest.

Templates name the stack that keeps a run's image; only what is deployed has its id.
"""

from collections.abc import Iterator

from review.assembly import Side, StackSide
from review.run_effects import launch_templates, read_run_env
from review.spelling import spell


def image_notes(base: Side, head: Side) -> Iterator[str]:
    """Yield a sentence for each training stack."""
    for name, had, starts in _images(base, head):
        if had == starts:
            yield f"{name} starts the image that it has: {_spelled(starts, base, head)}."
        else:
            has = f"; it has {_spelled(had, base, head)}" if had else ""
            yield f"{name} starts {_spelled(starts, base, head)}{has}."


def image_effects(base: Side, head: Side) -> Iterator[str]:
    """Yield a sentence for each run that may go on with another image."""
    for name, had, starts in _images(base, head):
        run = read_run_env(head.stacks[name].template).get("RUN_ID")
        if had in ("", starts) or run != read_run_env(base.stacks[name].template).get("RUN_ID"):
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
    """Yield each training stack with the image that it has, if any, and the one that it starts."""
    for name, stack in sorted(head.stacks.items()):
        if wanted := _wanted(stack):
            old, keeper = base.stacks.get(name), base.stacks.get(wanted)
            had = (old.image or _wanted(old)) if old else ""
            yield name, had, (keeper and keeper.image) or wanted


def _wanted(stack: StackSide) -> str:
    """Return the image's id, the stack that keeps it, or the parameter that names the newest."""
    for data in launch_templates(stack.resources.values()):
        image = data.get("ImageId")
        if isinstance(image, dict) and "Ref" in image:
            image = stack.template.get("Parameters", {}).get(image["Ref"], {}).get("Default")
        return spell(image.get("Fn::ImportValue", image) if isinstance(image, dict) else image)
    return ""


def _is_id(image: str) -> bool:
    return image.startswith("ami-")


def _spelled(image: str, base: Side, head: Side) -> str:
    if image in base.stacks:
        return f"the one that {image} keeps"
    if image not in head.stacks:
        return image if _is_id(image) else f"the newest of {image}"
    (keeper,) = head.stacks[image].resources.values()
    return f"the newest of {str(keeper['Properties']['Value'])[14:-2]}, which {image} then keeps"
