"""The review of one change, built from two sides and the CLI's diffs, and when it fails."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from contract.stack_names import other_prefixes
from review.assembly import CdkDiff, Side
from review.changes import Change, Objection, find_changes
from review.costs import CostRow, cost_rows, plan_warnings, price_note
from review.objections import STATEFUL, find_losses, find_refusals
from review.protections import find_weakened
from review.run_effects import find_run_effects, image_notes
from review.security import SecurityChange, find_security_changes

FailOn = Literal["data-loss", "destructive", "never"]
_FACTS = ("stack", "logical_id", "path", "type", "action", "why")


@dataclass(frozen=True, kw_only=True, slots=True)
class Review:
    """Everything that a deploy of head over base does."""

    base: str
    head: str
    notes: Sequence[str]
    changes: Sequence[Change]
    losses: Sequence[Objection]
    refusals: Sequence[Objection]
    weakened: Sequence[Objection]
    security: Sequence[SecurityChange]
    run_effects: Sequence[str]
    costs: Sequence[CostRow]
    prices: str  # their region, basis and date
    warnings: Sequence[str]
    diffs: Sequence[CdkDiff]

    @property
    def destructive(self) -> list[Change]:
        """The changes that replace or remove a resource, or may do so."""
        kept = ("added", "changed")
        return [change for change in self.changes if change.action not in kept]

    def exit_code(self, fail_on: FailOn, accepted: Sequence[str] = ()) -> int:
        """Return 1 if the change does what `fail_on` names or loses an unaccepted protection."""
        if fail_on == "never":
            return 0
        weakened = [each for each in self.weakened if each.accept not in accepted]
        return int(bool(self.losses or weakened or (fail_on == "destructive" and self.destructive)))

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the CLI's text, for --json."""
        return {
            "base": self.base,
            "head": self.head,
            "notes": list(self.notes),
            "data_loss": [dataclasses.asdict(loss) for loss in self.losses],
            "refused": [dataclasses.asdict(refusal) for refusal in self.refusals],
            "weakened": [dataclasses.asdict(each) for each in self.weakened],
            "changes": [
                {name: getattr(change, name) for name in _FACTS}
                | {"properties": [path for path, _, _ in change.differences()]}
                for change in self.changes
            ],
            "security": [dataclasses.asdict(each) for each in self.security],
            "run": list(self.run_effects),
            "costs": [dataclasses.asdict(row) for row in self.costs],
            "prices": self.prices,
            "warnings": list(self.warnings),
        }


def judge(base: Side, head: Side, diffs: Sequence[CdkDiff]) -> Review:
    """Compile the review; a pure function."""
    changes = _with_cli_replacements(find_changes(base, head), diffs)
    return Review(
        base=base.name,
        head=head.name,
        notes=[*_added_and_removed_stacks(base, head), *image_notes(base, head)],
        changes=changes,
        losses=find_losses(base, head, changes),
        refusals=find_refusals(base, head, changes),
        weakened=find_weakened(head, changes),
        security=find_security_changes(base, head, changes),
        run_effects=find_run_effects(base, head, changes),
        costs=cost_rows(base, head),
        prices=price_note(base, head),
        warnings=plan_warnings(head),
        diffs=diffs,
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
