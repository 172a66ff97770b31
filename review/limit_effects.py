"""What changed limits of the Guard do to a run in progress: hours, dollars, wait, deadline."""

from collections.abc import Iterator, Mapping

from review.assembly import StackSide
from review.changes import Change

# The Guard's variables with a limit, and how a limit reads. In all but the first, 0 is none.
_SPELLED = {
    "MAX_BILLED_HOURS": "{} billed hours",
    "MAX_USD": "${}",
    "MAX_WAIT_HOURS": "{} hours without a machine",
}
_NONE = "0"
_DEADLINE = "DEADLINE_HOURS"


def find_limit_effects(change: Change) -> Iterator[str]:
    """Yield a sentence for each limit that a changed Guard gets; none for another function."""
    old, new = _variables(change.old_properties), _variables(change.new_properties)
    for name, spelling in _SPELLED.items():
        before, after = old.get(name, _NONE), new.get(name, _NONE)
        if before == after:
            continue
        if after == _NONE:
            yield f"**A limit goes**: the Guard no longer stops the run at {_of(spelling, before)}."
            continue
        text = f"The Guard stops the run at {_of(spelling, after)}"
        if before == _NONE:
            yield f"{text} now; there was no such limit. What the run has used so far counts."
        elif float(after) < float(before):
            yield (
                f"**{text}, no longer {_of(spelling, before)}**: a run that has used more goes to "
                "zero within ten minutes. It saves, and a deploy with a higher limit resumes it."
            )
        else:
            yield f"{text}, no longer {_of(spelling, before)}; what the run has used so far counts."
    yield from _deadline_effects(old.get(_DEADLINE, _NONE), new.get(_DEADLINE, _NONE))


def has_deadline(stack: StackSide) -> bool:
    """Whether the stack's Guard buys on-demand capacity to meet a deadline."""
    return any(
        _variables(each.get("Properties") or {}).get(_DEADLINE, _NONE) != _NONE
        for each in stack.resources.values()
        if each["Type"] == "AWS::Lambda::Function"
    )


def _of(spelling: str, value: str) -> str:
    return spelling.format(value)


def _deadline_effects(before: str, after: str) -> Iterator[str]:
    if before == after:
        return
    if after == _NONE:
        yield (
            f"**The deadline of {before} hours goes**: the Guard asks for what the template has. "
            "An on-demand instance that it bought trains until Spot is there, and ends then."
        )
    elif before == _NONE:
        yield (
            f"**The run gets a deadline, {after} hours after its start**: where Spot puts it in "
            "danger, the Guard buys an on-demand instance. Moving to it is a notice to the "
            "trainer, which saves and resumes there."
        )
    else:
        yield (
            f"The deadline moves from {before} to {after} hours after the run's start: the Guard "
            "decides anew between Spot and on demand within ten minutes."
        )


def _variables(properties: Mapping[str, object]) -> Mapping[str, str]:
    environment = properties.get("Environment")
    variables = environment.get("Variables") if isinstance(environment, dict) else None
    return variables if isinstance(variables, dict) else {}
