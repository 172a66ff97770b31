"""The reasons to stop a run, each with advice: pure functions of what a call knows."""

from collections.abc import Iterable
from dataclasses import dataclass

from contract.keys import HEAD
from contract.stack_names import training_id
from stacks.guard.budget import period_of
from stacks.guard.ledger import MachineAttempt
from stacks.guard.tick import CALL_SECONDS, DONE_STATES, Tick

# A machine's message may be long; the event in S3 has all of it.
MAX_REPORT_CHARACTERS = 500
# What EC2 says if it may not use a volume's key (stacks/data_key.py).
EBS_KEY = (
    "Client.InternalError: the fleet's service-linked roles may not use the key of the volumes, "
    "perhaps the account's default EBS key; docs/security.md lists what it must grant."
)
_DEPLOY = "First deploy with the run's options (DeployCommand, if the stack prints it) and"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a run is stopped, in one sentence, and what the reader can do about it."""

    sentence: str
    advice: str
    reports: tuple[str, ...] = ()  # of machines that failed


def reason_to_stop(tick: Tick) -> Reason | None:
    """Return the first reason to stop that applies; a head that could not be read gives none."""
    return (
        _headless(tick)
        or _over(tick)
        or _too_dear(tick)
        or _over_budget(tick)
        or _barren(tick)
        or _silent(tick)
        or _waits(tick)
        or _lost(tick)
    )


def _headless(tick: Tick) -> Reason | None:
    if not tick.is_headless:  # else its trainer has lost the lease, and the next one will not start
        return None
    place, key = f"--bucket {tick.settings.run_bucket}", f"{tick.settings.run_prefix}/{HEAD}"
    return Reason(
        sentence=f"{HEAD} is missing, though the run has begun",
        advice="Restore its last version by deleting its delete marker, whose ID the first command "
        "prints:\n"
        f"aws s3api list-object-versions {place} --prefix {key} --query DeleteMarkers\n"
        f"aws s3api delete-object {place} --key {key} --version-id ID",
    )


def _over(tick: Tick) -> Reason | None:
    head = tick.head or {}
    if head.get("state") not in DONE_STATES:
        return None
    if head["state"] == "finished":
        advice = (
            f"Receipt, report and weights are below {tick.settings.run_uri}.\n"
            "The idle stack still costs a few dollars a month; this ends it and keeps the buckets: "
            f"npx cdk destroy {training_id(tick.settings.stack_name)}"
        )
        return Reason(sentence="the run is finished", advice=advice)
    advice = f"{str(head.get('reason') or 'The events say why.')[:4000]}\nFix that first."
    return Reason(sentence="the run has failed", advice=advice)


def _too_dear(tick: Tick) -> Reason | None:
    settings, ledger = tick.settings, tick.ledger
    # What ran at the last look runs on, as far as is known, while EC2 says nothing of it.
    ran = [
        (each, (ledger.may_run_until(name, settings, tick.now, tick.heard) - each.seen) / 3600)
        for name, each in ledger.attempts.items()
        if each.is_live
    ]
    # Without guard.json, one that has ended would count until now.
    hours = sum(each.hours for each in ledger.attempts.values() if tick.is_read or each.is_live)
    hours += sum(more for _, more in ran)
    usd = ledger.billed_usd() + sum(more * each.usd_per_hour for each, more in ran)
    if hours > settings.max_billed_hours:
        return Reason(
            sentence=f"{hours:.1f} hours billed; max_hours is {settings.max_billed_hours:g}",
            advice=f"{_DEPLOY} a larger max_hours.",
        )
    ahead = tick.usd_ahead
    # Without the ledger, a machine's past hours would count at the price of now.
    if settings.max_usd and usd + ahead > settings.max_usd and tick.is_read:
        until = f", ${ahead:.2f} more until the next call could end it" if ahead else ""
        return Reason(
            sentence=f"${usd:.2f} billed{until}; max_usd is {settings.max_usd:g}",
            advice=f"{_DEPLOY} a larger max_usd.",
        )
    return None


def _over_budget(tick: Tick) -> Reason | None:
    """Of several runs together; one that has not begun must fit in with all of its plan."""
    settings, budget = tick.settings, tick.budget
    if budget is None:  # the run has none, or it could not be read
        return None
    # What it sees may have been resumed since, with the next period's money.
    if period_of(settings, tick.now + CALL_SECONDS) != period_of(settings, tick.now):
        return None
    needs = tick.usd_ahead
    if tick.head == {} and settings.forecast is not None:
        needs = max(needs, settings.forecast.seconds / 3600 * settings.planned_usd_per_hour)
    others = budget.ahead - budget.runs[settings.run_id]["ahead"]
    if budget.usd + others + needs <= settings.budget_usd:
        return None
    return Reason(
        sentence=f"the budget {settings.budget_name} is ${settings.budget_usd:g} for "
        f"{period_of(settings, tick.now)}: ${budget.usd:.2f} are spent, other runs may spend "
        f"${others:.2f} until their next calls, and this one needs ${needs:.2f}",
        advice=f"{_DEPLOY} a larger budget.usd, or wait for the next {settings.budget_period}.",
    )


def _barren(tick: Tick) -> Reason | None:
    settings, barren = tick.settings, tick.ledger.barren_attempts()
    # Without the head, what they have committed since is not known: wait until S3 answers.
    is_unknown = tick.head is None or not tick.is_read
    if (is_unknown and not tick.refusal) or len(barren) < settings.max_barren_attempts:
        return None
    # A market is chosen by the head, so none is tried while it is refused.
    if tick.ledger.is_barren_on_spot(settings) and not tick.refusal:
        return None
    # A message that several machines share is listed once.
    senders: dict[str, list[str]] = {}
    for name, each in barren.items():
        message = each.said[:MAX_REPORT_CHARACTERS] or "no event machine-failed"
        senders.setdefault(message, []).append(_named(name, each))
    advice = "Fix what they report first."
    if tick.refusal:
        advice = f"S3 refuses the Guard, and perhaps the machines, the run's {tick.refusal}\n"
        advice += "Look at the bucket's name and policy, and at the key: its state and its policy."
    elif "Client.InternalError" in "".join(senders):
        advice = EBS_KEY
    return Reason(
        sentence=f"{len(barren)} attempts in a row committed nothing",
        advice=advice,
        reports=tuple(f"{', '.join(names)}: {message}" for message, names in senders.items()),
    )


def _named(instance_id: str, attempt: MachineAttempt) -> str:
    what = ", ".join(filter(None, (attempt.size, attempt.market, f"{attempt.hours * 60:.0f} min")))
    return f"{instance_id} ({what})"


def silence(tick: Tick, attempts: Iterable[MachineAttempt]) -> float:
    """Return for how many seconds nothing was heard of any of these machines; 0 if unknown."""
    if tick.head is None:
        return 0.0
    # A replacement gets the full timeout: it boots and syncs before its first heartbeat, and gets
    # it again whenever its boot has got something done, and after S3 was silent for the Guard too.
    signs = [max(each.launched, each.advanced) for each in attempts]
    return tick.now - max(*signs, tick.last_word, tick.ledger.blind_until) if signs else 0.0


def _silent(tick: Tick) -> Reason | None:
    seconds = silence(tick, (each for each in tick.ledger.attempts.values() if each.is_live))
    if seconds <= tick.settings.heartbeat_timeout_seconds:
        return None
    return Reason(
        sentence=f"no heartbeat for {seconds:.0f} s while an instance runs",
        advice="The run's events and its logs say how far it got.",
    )


def _waits(tick: Tick) -> Reason | None:
    # One may have come since EC2 last answered, or come and gone while nothing could be kept, and a
    # heartbeat without an instance comes from one that has lost its tags.
    if tick.instances is None or tick.head is None:
        return None
    ledger = tick.ledger
    since = max(ledger.waiting, tick.last_word, ledger.blind_until) if ledger.waiting else tick.now
    hours, most = (tick.now - since) / 3600, tick.settings.max_wait_hours
    if not most or hours <= most:
        return None
    return Reason(
        sentence=f"no instance for {hours:.1f} hours; max_wait_hours is {most:g}",
        advice=f"The fleet's events say why. {_DEPLOY} more zones, other GPUs (mix_gpus) or "
        "on_demand_base=1, which find capacity sooner.",
    )


def _lost(tick: Tick) -> Reason | None:
    if not tick.lost:
        return None
    return Reason(
        sentence=f"{tick.lost}, so what has been spent is unknown",
        advice="Restore an older version, or delete all of them to count from zero.",
    )
