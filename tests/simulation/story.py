"""A seed's story for a person: what does not matter dropped, in twenty lines."""

from collections.abc import Callable

from tests.simulation.life import Outcome, live_through
from tests.simulation.plan import Plan

LINES = 20


def _kind(broken: tuple[str, ...]) -> str:
    return broken[0].partition(":")[0] if broken else ""


def shrink(found: Outcome, live: Callable[[Plan], Outcome] = live_through) -> Outcome:
    """Drop happenings, many at once and then one by one, while the same promise is broken."""
    kind, size = _kind(found.broken), max(1, len(found.plan.parts) // 2)
    while size:
        start = 0
        while start < len(found.plan.parts):
            gone = found.plan.parts[start : start + size]
            tried = live(found.plan.without(*gone))
            if kind in {each.partition(":")[0] for each in tried.broken}:
                found = tried
            else:
                start += size
        size //= 2
    return found


def shortened(found: Outcome) -> list[str]:
    """Return the outcome and its story; of a long one the beginning, and the end with the cause."""
    plan = found.plan
    lines = [f"{hours(at)} {text}" for at, text in found.story]
    mark = next((n for n, line in enumerate(lines) if "***" in line), len(lines) - 1)
    lines = lines[: mark + 3]
    if len(lines) > LINES:
        lines = [*lines[:4], f"... {len(lines) - LINES} more ...", *lines[4 - LINES :]]
    size = f"{plan.state_bytes / 1e9:.3f} GB"
    head = (
        f"seed {plan.seed}, {plan.fleet}: {plan.steps} steps of {plan.step_seconds:.0f} s, {size} "
        f"at {plan.upload_rate / 1e6:.0f} MB/s, ready after {plan.life.ready / 60:.0f} min, "
        f"interval {plan.interval}, {len(plan.happenings)} happenings: {found.state}, "
        f"{found.attempts} attempts, {found.hours:.1f} machine hours"
    )
    return [head, *lines, *(f"broken: {each}" for each in found.broken)]


def hours(seconds: float) -> str:
    """Return a time since the deploy."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60:3.0f}:{minutes % 60:02.0f}:{rest:04.1f}"
