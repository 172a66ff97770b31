"""When a run no longer pays: finished, over budget, barren or silent. Pure functions."""

from typing import Any

from stacks.guard.ledger import Ledger
from stacks.guard.settings import Settings

DONE_STATES = frozenset(["finished", "failed"])


def reason_to_stop(
    settings: Settings, ledger: Ledger, head: dict[str, Any], head_written: float, now: float
) -> str | None:
    """Return which of the four reasons to stop applies, if any."""
    if head.get("state") in DONE_STATES:
        return f"the run is {head['state']}"
    hours = ledger.billed_hours()
    if hours > settings.max_billed_hours:
        return f"{hours:.1f} hours billed; max_hours is {settings.max_billed_hours:g}"
    barren = ledger.barren_attempts()
    if barren >= settings.max_barren_attempts:
        return f"{barren} attempts in a row committed nothing"
    live = [each.launched for each in ledger.attempts.values() if each.is_live]
    if live:
        # A replacement gets the full timeout: it boots and syncs before its first heartbeat.
        silence = now - max(max(live), head_written)
        if silence > settings.heartbeat_timeout_seconds:
            return f"no heartbeat for {silence:.0f} s while an instance runs"
    return None
