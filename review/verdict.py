"""The review of one change, built from two sides and the CLI's diffs, and when it fails."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from contract.stack_names import other_prefixes
from review.assembly import NESTED, CdkDiff, Side
from review.boot import find_unbootable
from review.changes import Change, Effect, Kind, find_changes
from review.costs import CostRow, cost_rows, plan_warnings, price_note
from review.objections import STATEFUL, find_losses, find_refusals
from review.protections import find_weakened
from review.run_effects import certificate_notes, find_run_effects, image_notes
from review.security import find_security_changes, without_names
from review.spelling import short

FailOn = Literal["data-loss", "destructive", "never"]
_FACTS = ("stack", "logical_id", "path", "type", "action", "why")
# The kinds of effects that have a section each, in its order; all are counted in the headline.
HEADINGS: dict[Kind, str] = {
    "drift": "Drift", "stack": "Stacks", "loss": "Data loss", "boot": "A machine cannot boot",
    "weakened": "Protections lost", "refused": "A deploy would fail", "data": "What keeps data",
    "resource": "Resources", "security": "Security", "run": "A run in progress",
    "alarm": "Alarms",
}  # fmt: skip
_BOLD = ("drift", "loss", "boot", "weakened", "refused")
# What a resource serves, by its service: elsewhere the run, except what keeps data.
_SERVED: dict[str, Kind] = {"CloudWatch": "alarm", "SNS": "alarm", "S3": "data"}
# Properties whose effects have sentences of their own, and the wording of people.
_TOLD = re.compile(
    r"Policy(Document)?(\.|$)|UserData|Overrides|ImageId|Code\.|DashboardBody|Description|^Tags|"
    r"TargetCapacity|LaunchTemplateSpecification|^Value$|TerminationProtection|Variables\.(FORECAST|MAX_|"
    r"DEADLINE|HEARTBEAT|\w*USD_PER_HOUR|CALL_EVERY)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Review:
    """Everything that a deploy of head over base does."""

    base: str
    head: str
    notes: Sequence[str]
    changes: Sequence[Change]
    effects: Sequence[Effect]
    costs: Sequence[CostRow]
    prices: str  # their region, basis and date
    warnings: Sequence[str]
    diffs: Sequence[CdkDiff]

    def of(self, *kinds: Kind) -> list[Effect]:
        """Return the effects of some kinds."""
        return [each for each in self.effects if each.kind in kinds]

    @property
    def destructive(self) -> list[Change]:
        """The changes that replace or remove a resource, or may do so."""
        kept = ("added", "changed")
        return [change for change in self.changes if change.action not in kept]

    def exit_code(self, fail_on: FailOn, accepted: Sequence[str] = ()) -> int:
        """Return 1 if the change does what `fail_on` names or what nobody has accepted."""
        if fail_on == "never":
            return 0
        fatal = any(
            each.accept not in accepted if each.accept else each.kind == "loss"
            for each in self.effects
        )
        return int(fatal or (fail_on == "destructive" and bool(self.destructive)))

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the CLI's text, for --json."""
        return {
            "base": self.base,
            "head": self.head,
            "headline": headline(self.effects),
            "notes": list(self.notes),
            "effects": [dataclasses.asdict(each) for each in self.effects],
            "changes": [
                {name: getattr(change, name) for name in _FACTS}
                | {"properties": [path for path, _, _ in change.differences()]}
                for change in self.changes
            ],
            "costs": [dataclasses.asdict(row) for row in self.costs],
            "prices": self.prices,
            "warnings": list(self.warnings),
        }


def headline(effects: Sequence[Effect]) -> str:
    """Say what the effects add up to: of the rows alone, so that it cannot contradict them."""
    if not effects:
        return "**Nothing changes**: both sides synthesize to the same resources."
    kinds = {each.kind for each in effects}
    doubt = " found" if "data" in kinds else ""
    parts = [] if "loss" in kinds else [f"No data loss{doubt}."]
    for kind, head in HEADINGS.items():
        done = Counter(each.action for each in effects if each.kind == kind)
        text = ", ".join(f"{count} {action}".strip() for action, count in done.items())
        parts += [f"**{head}: {text}.**" if kind in _BOLD else f"{head}: {text}."] if done else []
    words = sorted({each.accept for each in effects} - {""})
    return " ".join([*parts, *[f"**To be accepted: {', '.join(words)}.**"] * bool(words)])


def judge(base: Side, head: Side, diffs: Sequence[CdkDiff]) -> Review:
    """Compile the review; a pure function."""
    changes = _with_cli_replacements(find_changes(base, head), diffs)
    costs = cost_rows(base, head)
    return Review(
        base=base.name,
        head=head.name,
        notes=[*image_notes(base, head), *certificate_notes(base, head)],
        changes=changes,
        effects=list(_effects(base, head, changes, costs)),
        costs=costs,
        prices=price_note(base, head),
        warnings=plan_warnings(head),
        diffs=diffs,
    )


def _effects(
    base: Side, head: Side, changes: Sequence[Change], costs: Sequence[CostRow]
) -> Iterator[Effect]:
    for name, stack in base.stacks.items():
        if stack.drift:
            yield Effect("drift", stack.drift, stack=name)
    yield from find_losses(base, head, changes)
    yield from find_unbootable(base, head)
    yield from find_weakened(base, head, changes)
    yield from find_refusals(base, head, changes)
    neutral = without_names(base, head, changes)
    yield from find_security_changes(base, head, neutral)
    yield from (Effect("run", each) for each in find_run_effects(base, head, changes))
    yield from _rest(neutral)
    yield from _unopened(base, head, changes)
    yield from (Effect("stack", each) for each in _added_and_removed_stacks(base, head))
    for change in changes:
        what = f"{change.type}; {change.why}".removesuffix("; ")
        yield dataclasses.replace(change.effect("resource", what), action=change.action)
    yield from (Effect("cost", row.name) for row in costs if row.difference)


def _rest(changes: Sequence[Change]) -> Iterator[Effect]:
    """Yield each changed property of what keeps data, trains or watches, if no rule is for it."""
    for change in changes:
        kind = _SERVED.get(change.type.split("::")[1], "run")
        kind = "data" if change.type in STATEFUL else kind
        if change.action in ("added", "removed"):
            if change.type.startswith("AWS::EC2") and "Fleet" not in change.type:
                yield change.effect(kind, f"{change.action}.")
            continue
        found = [each for each in change.differences() if not _TOLD.search(each[0])]
        verb = _fires(change, found) if kind == "alarm" else "changes"
        listed = [f"{path} {short(old)} → {short(new)}" for path, old, new in found]
        more = f" and {len(listed) - 6} more" if listed[6:] else ""
        if found:
            yield change.effect(kind, f"{verb}: {'; '.join(listed[:6])}{more}.")


def _unopened(base: Side, head: Side, changes: Sequence[Change]) -> Iterator[Effect]:
    """Find nested stacks that change, if their templates are not at hand."""
    stacks = [*base.stacks.values(), *head.stacks.values()]
    opened = {name.rpartition(".")[0] for each in stacks for name in each.nested}
    for change in changes:
        if change.type == NESTED and change.logical_id not in {"(the stack)", *opened}:
            what = "this nested stack changes, and nobody has looked into it: compare with a branch"
            yield change.effect("data", f"{what} (`python -m review BASE`).")


def _fires(alarm: Change, found: Sequence[tuple[str, Any, Any]]) -> str:
    """Say whether a changed alarm fires later, sooner or on something else."""
    steps = [
        # Lower is later where an alarm fires below its threshold.
        (old - new if path == "Threshold" and "Less" in json.dumps(alarm.new) else new - old)
        for path, old, new in found
        if isinstance(old, int | float) and isinstance(new, int | float)
    ]
    return (
        "**fires later**" if max(steps, default=0) > 0 else "fires sooner" if steps else "changes"
    )


def _with_cli_replacements(changes: Sequence[Change], diffs: Sequence[CdkDiff]) -> list[Change]:
    """Mark resources as replaced where the CLI says so but the schemas do not."""
    words = {(diff.stack, name): word for diff in diffs for name, word in diff.destructive.items()}
    return [
        dataclasses.replace(change, action="replaced", why=f"the CDK CLI says: {word}")
        if change.action == "changed"
        and (word := words.get((change.stack, change.logical_id), "")).endswith("replaced")
        else change
        for change in changes
    ]


def _added_and_removed_stacks(base: Side, head: Side) -> list[str]:
    notes = [
        f"{name} is new: {len(head.stacks[name].resources)} resources."
        for name in sorted(head.stacks.keys() - base.stacks.keys())
    ] + [
        f"**{name} is built next to {prefix}{each.construct_id}, with nothing in it**: "
        f"`-c prefix={prefix}` updates that one instead."
        for name, each in sorted(head.stacks.items())
        if name not in base.stacks
        for prefix in other_prefixes(name, each.construct_id, base.others)
    ]
    for name in sorted(base.stacks.keys() - head.stacks.keys()):
        types = {each["Type"] for each in base.stacks[name].resources.values()}
        kept = sorted({kind for type_, kind in STATEFUL.items() if type_ in types})
        contents = f" It has a {' and a '.join(kept)}." if kept else ""
        if base.stacks[name].fleet:
            call = f"aws cloudformation delete-stack --stack-name {name}"
            contents += f" Its fleet goes on, and is billed, until `{call}`."
        notes.append(
            f"**{name} is no longer part of the app**: no deploy touches it, and this "
            f"code no longer updates it.{contents}"
        )
    return notes
