"""The reasons to stop a run, each with advice: pure functions of what is known."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stacks.guard.ledger import Ledger, MachineAttempt
from stacks.guard.settings import GuardSettings

DONE_STATES = frozenset(["finished", "failed"])
# A machine's message may be long; the event in S3 has all of it.
MAX_SAID_CHARACTERS = 500
# What EC2 says if it may not use a volume's key (stacks/data_key.py).
EBS_KEY = (
    "Client.InternalError: EC2's two Spot roles may not use the key of the volumes, perhaps the "
    "account's default EBS key; docs/security.md lists what it must grant."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a run is stopped, in one sentence, and what the reader can do about it."""

    sentence: str
    advice: str
    said: tuple[str, ...] = ()


def reason_to_stop(
    settings: GuardSettings,
    ledger: Ledger,
    head: Mapping[str, Any] | None,
    head_written: float,
    now: float,
) -> Reason | None:
    """Return the first reason to stop that applies; a head that could not be read gives none."""
    return (
        _over(settings, head)
        or _too_dear(settings, ledger)
        or _barren(settings, ledger)
        or _silent(settings, ledger, head, head_written, now)
        or _waits(settings, ledger, head_written, now)
    )


def _over(settings: GuardSettings, head: Mapping[str, Any] | None) -> Reason | None:
    state = (head or {}).get("state")
    if state not in DONE_STATES:
        return None
    if state == "finished":
        advice = f"Receipt, report and weights are below {settings.run_uri}."
        return Reason(sentence="the run is finished", advice=advice)
    why = (head or {}).get("reason")
    advice = f"{why or 'The events say why.'}\nFix that first."
    return Reason(sentence="the run has failed", advice=advice)


def _too_dear(settings: GuardSettings, ledger: Ledger) -> Reason | None:
    hours, usd = ledger.billed_hours(), ledger.billed_usd()
    if hours > settings.max_billed_hours:
        return Reason(
            sentence=f"{hours:.1f} hours billed; max_hours is {settings.max_billed_hours:g}",
            advice="First deploy with a larger max_hours.",
        )
    # A run stopped at the next call keeps running until then and for a notice, perhaps two.
    seconds = settings.call_every_seconds + 2 * settings.notice_seconds
    ahead = ledger.usd_per_hour * seconds / 3600
    if settings.max_usd and usd + ahead > settings.max_usd:
        until = f", ${ahead:.2f} more until the next call could end it" if ahead else ""
        return Reason(
            sentence=f"${usd:.2f} billed{until}; max_usd is {settings.max_usd:g}",
            advice="First deploy with a larger max_usd.",
        )
    return None


def _barren(settings: GuardSettings, ledger: Ledger) -> Reason | None:
    barren = ledger.barren_attempts()
    if len(barren) < settings.max_barren_attempts or ledger.is_barren_on_spot(settings):
        return None
    # A message that several machines share is listed once.
    said: dict[str, list[str]] = {}
    for name, each in barren.items():
        words = each.said[:MAX_SAID_CHARACTERS] or "no event machine-failed"
        said.setdefault(words, []).append(_named(name, each))
    return Reason(
        sentence=f"{len(barren)} attempts in a row committed nothing",
        advice=EBS_KEY
        if "Client.InternalError" in "".join(said)
        else "Fix what they report first.",
        said=tuple(f"{', '.join(names)}: {words}" for words, names in said.items()),
    )


def _named(instance_id: str, attempt: MachineAttempt) -> str:
    what = ", ".join(filter(None, (attempt.size, attempt.market, f"{attempt.hours * 60:.0f} min")))
    return f"{instance_id} ({what})"


def _silent(
    settings: GuardSettings,
    ledger: Ledger,
    head: Mapping[str, Any] | None,
    head_written: float,
    now: float,
) -> Reason | None:
    live = [max(each.launched, each.advanced) for each in ledger.attempts.values() if each.is_live]
    if head is None or not live:
        return None
    # A replacement gets the full timeout: it boots and syncs before its first heartbeat, and gets
    # it again whenever its boot has got something done.
    silence = now - max(max(live), head_written)
    if silence <= settings.heartbeat_timeout_seconds:
        return None
    return Reason(
        sentence=f"no heartbeat for {silence:.0f} s while an instance runs",
        advice="The run's events and its logs say how far it got.",
    )


def _waits(
    settings: GuardSettings, ledger: Ledger, head_written: float, now: float
) -> Reason | None:
    # A heartbeat without an instance comes from one that has lost its tags.
    since = max(ledger.waiting, head_written) if ledger.waiting else now
    hours = (now - since) / 3600
    if not settings.max_wait_hours or hours <= settings.max_wait_hours:
        return None
    return Reason(
        sentence=f"no instance for {hours:.1f} hours; max_wait_hours is "
        f"{settings.max_wait_hours:g}",
        advice="The fleet's events say why. More zones, other GPUs (mix_gpus) or "
        "on_demand_base=1 find capacity sooner.",
    )
