"""The whole review of one change, from two sides and the CLI's diffs; and what makes it fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from review.assembly import Side
from review.cdk_diff import CdkDiff
from review.changes import Change, find_changes
from review.costs import Row, cost_rows, plan_warnings
from review.losses import STATEFUL, Loss, find_losses
from review.refusals import Refusal, find_refusals
from review.run_effects import find_run_effects
from review.security import SecurityChange, find_security_changes

FailOn = Literal["data-loss", "destructive", "never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Review:
    """What a deploy of head over base does."""

    base: str
    head: str
    notes: Sequence[str]
    changes: Sequence[Change]
    losses: Sequence[Loss]
    refusals: Sequence[Refusal]
    security: Sequence[SecurityChange]
    run_effects: Sequence[str]
    costs: Sequence[Row]
    warnings: Sequence[str]
    diffs: Sequence[CdkDiff]

    @property
    def destructive(self) -> list[Change]:
        """What is replaced or removed."""
        return [change for change in self.changes if change.action in ("replaced", "removed")]

    def exit_code(self, fail_on: FailOn) -> int:
        """1 where the change does what it should not do unseen."""
        if fail_on == "never":
            return 0
        return int(bool(self.losses or (fail_on == "destructive" and self.destructive)))

    def as_dict(self) -> dict[str, Any]:
        """For --json: everything but the CLI's text."""
        return {
            "base": self.base,
            "head": self.head,
            "notes": list(self.notes),
            "data_loss": [dataclasses.asdict(loss) for loss in self.losses],
            "refused": [dataclasses.asdict(refusal) for refusal in self.refusals],
            "changes": [
                {
                    "stack": change.stack,
                    "logical_id": change.logical_id,
                    "path": change.path,
                    "type": change.type,
                    "action": change.action,
                    "why": change.why,
                    "properties": [path for path, _, _ in change.differences()],
                }
                for change in self.changes
            ],
            "security": [dataclasses.asdict(each) for each in self.security],
            "run": list(self.run_effects),
            "costs": [dataclasses.asdict(row) for row in self.costs],
            "warnings": list(self.warnings),
        }


def judge(base: Side, head: Side, diffs: Sequence[CdkDiff]) -> Review:
    """Put the review together; a pure function."""
    changes = _with_the_clis_word(find_changes(base, head), diffs)
    return Review(
        base=base.name,
        head=head.name,
        notes=[*base.notes, *head.notes, *_stacks_that_came_or_went(base, head)],
        changes=changes,
        losses=find_losses(base, head, changes),
        refusals=find_refusals(base, head, changes),
        security=find_security_changes(changes),
        run_effects=find_run_effects(base, head, changes),
        costs=cost_rows(base, head),
        warnings=plan_warnings(head),
        diffs=diffs,
    )


def _with_the_clis_word(changes: Sequence[Change], diffs: Sequence[CdkDiff]) -> list[Change]:
    """Take a change for a replacement where the CLI does and the schemas do not."""
    words = {(diff.stack, name): word for diff in diffs for name, word in diff.destructive.items()}
    return [
        dataclasses.replace(change, action="replaced", why=f"the CDK CLI says: {word}")
        if change.action == "changed"
        and (word := words.get((change.stack, change.logical_id), "")).endswith("replaced")
        else change
        for change in changes
    ]


def _stacks_that_came_or_went(base: Side, head: Side) -> list[str]:
    notes = [
        f"{name} is new: {len(head.stacks[name].resources)} resources."
        for name in sorted(head.stacks.keys() - base.stacks.keys())
    ]
    for name in sorted(base.stacks.keys() - head.stacks.keys()):
        kept = sorted(
            {STATEFUL[each["Type"]] for each in base.stacks[name].resources.values()
             if each["Type"] in STATEFUL}
        )  # fmt: skip
        holding = f" It holds a {' and a '.join(kept)}." if kept else ""
        notes.append(
            f"**{name} is no longer part of the app**: no deploy touches it, and nothing here "
            f"updates it from now on.{holding}"
        )
    return notes
