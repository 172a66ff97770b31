"""The Guard's duties at every call: stop a run that no longer pays, end what runs for nothing."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from contract.stack_names import training_id
from stacks.guard import fleet
from stacks.guard.fleet import StackInstance
from stacks.guard.ledger import Ledger, Note
from stacks.guard.reasons import Reason, reason_to_stop, silence
from stacks.guard.tick import CALL_SECONDS, DONE_STATES, Tick

# The key of the note about a refused stop: sent once, until a stop succeeds.
REFUSED = "stop refused"
_UNHEARD = "its user data did not run, or it cannot reach S3"
# How long a machine may be silent from its launch on: its first word is that it has the bundle.
UNHEARD_SECONDS = 1500.0
# The key of one about a stop that may be followed by others.
STOPPED = "to-zero"
ADVICE = "Fix the permissions of the Guard's role: a policy of the account may deny it the call."


def stop(tick: Tick) -> None:
    """Send the fleet to zero if there is a reason; report a run as over, whoever stopped it."""
    reason = reason_to_stop(tick)
    _tell_of_earlier(tick, is_to_stop=reason is not None)
    if reason is None:
        return
    is_over = (tick.head or {}).get("state") in DONE_STATES
    # A machine that finds no head sends the fleet to zero before a call sees it.
    is_told_once = is_over or tick.is_headless
    # A capacity that could not be read is not a reason to spare the fleet.
    is_wanted = tick.capacity.get(tick.fleet_id or "") != 0 or (tick.is_new and not is_over)
    if tick.fleet_id and is_wanted:
        _stop_fleet(tick, tick.fleet_id, reason, is_told_once=is_told_once)
    elif is_told_once and tick.is_kept:  # without its ledger, each call would report it again
        _report_stop(tick, reason, is_told_once=True, ways=["mail"])


def start(tick: Tick) -> None:
    """Request the machine of a new fleet that begins empty, unless the run is to stop."""
    fleet_id, on_demand = tick.fleet_id, tick.settings.on_demand_base
    if not fleet_id or fleet_id not in tick.capacity or reason_to_stop(tick) is not None:
        return
    own = fleet.StackFleet.of(fleet_id)
    if tick.capacity[fleet_id]:
        if tick.ledger.waiting:
            tick.does("launches", own.keep_launching)
    # A budget that could not be read is not one with room.
    elif (
        tick.is_new
        and bool(tick.settings.budget_name) == (tick.budget is not None)
        and tick.known("new fleet", own.is_new)  # nobody has stopped it since this call looked
        and tick.does("first machine", partial(own.set_capacity, 1, on_demand))
    ):
        tick.done.append(("start", f"{fleet_id} is new"))


def _stop_fleet(tick: Tick, fleet_id: str, reason: Reason, *, is_told_once: bool) -> None:
    """Send the fleet to zero; if EC2 refuses, cancel it; if that fails too, end its instances."""
    refused: list[str] = []
    own, ways = fleet.StackFleet.of(fleet_id), ["event", "mail"]
    tell = partial(_report_stop, tick, reason, is_told_once=is_told_once, ways=ways)
    if tick.is_kept and not is_told_once:  # this call may end before it can say so
        tell(awaits=fleet_id)
    for action, call in (("to-zero", own.send_to_zero), ("cancel", own.cancel)):
        refusal = tick.known("fleet to zero", partial(fleet.refusal_of, call))
        if refusal is None:  # a passing error: the next call tries again
            return
        if not refusal:
            tick.done.append((action, reason.sentence))
            tick.capacity[fleet_id] = 0
            tell(
                refused=refused, also=partial(_stopped, tick=tick, fleet_id=fleet_id, is_told=True)
            )
            return
        refused.append(refusal)
    tick.failed.append(f"fleet to zero: {'; '.join(refused)}")
    tick.update(partial(_not_stopped, fleet_id=fleet_id))
    # Buy nothing for a run that is to stop.
    tick.capacity.pop(fleet_id, None)
    for instance in tick.live():
        if tick.fleet_of(instance) == fleet_id:
            _end(tick, instance, f"its fleet could not be ended, though {reason.sentence}")
    if tick.is_kept:  # without its ledger, each call would report it again
        _report_refusal(tick, fleet_id, reason, refused)


def _tell_of_earlier(tick: Tick, *, is_to_stop: bool) -> None:
    """Tell of a stop whose call did not hear what came of it."""
    for note in [each for each in tick.ledger.notes if each.awaits]:
        is_old, wanted = tick.now - note.time > CALL_SECONDS, tick.capacity.get(note.awaits)
        if wanted == 0 and not tick.is_new:
            tick.update(partial(_stopped, tick=tick, fleet_id=note.awaits, is_told=False))
        elif (wanted or tick.fleet_id not in (None, note.awaits)) and is_old and not is_to_stop:
            tick.update(partial(_not_stopped, fleet_id=note.awaits))


def _stopped(ledger: Ledger, tick: Tick, fleet_id: str, *, is_told: bool) -> None:
    """Note that a fleet is at zero, and send the note that has awaited it unless it is told."""
    ledger.stopped = tick.now
    ledger.done.pop(REFUSED, None)
    ledger.observe_fleets(tick.capacity, tick.fleet_id, tick.now)
    for note in [each for each in ledger.notes if each.awaits == fleet_id]:
        if is_told:
            ledger.notes.remove(note)
        else:
            note.awaits, note.time = "", tick.now


def _not_stopped(ledger: Ledger, fleet_id: str) -> None:
    """Forget a stop that EC2 has not made: whoever stops the fleet later, it was not this one."""
    if any(each.awaits == fleet_id for each in ledger.notes):
        ledger.notes = [each for each in ledger.notes if each.awaits != fleet_id]
        ledger.done.pop(STOPPED, None)


def _report_refusal(tick: Tick, fleet_id: str, reason: Reason, refused: list[str]) -> None:
    tick.note(
        Note(
            key=REFUSED,
            time=tick.now,
            name="stop-refused",
            headline=f"The fleet could not be ended, its machines were: {reason.sentence}",
            lines=[
                *refused,
                ADVICE,
                "It keeps starting machines, and the Guard keeps ending them. End it: "
                + fleet.StackFleet.of(fleet_id).end_command,
                *reason.reports,
                reason.advice,
            ],
            fields={"message": reason.sentence, "fleet_id": fleet_id, "refused": refused},
            ways=["event", "mail"],
        ),
        again_after=math.inf,
    )


def _resume(tick: Tick, *, is_cancelled: bool) -> str:
    if is_cancelled:
        stack = training_id(tick.settings.stack_name)
        return (
            f"A cancelled fleet stays cancelled: npx cdk destroy {stack}, then deploy it again, "
            "and the run continues from its last commit."
        )
    # A deploy would not raise the capacity: CloudFormation sees no change between templates.
    return f"Then continue from the last commit: runs resume {tick.settings.run_id}"


def _report_stop(
    tick: Tick,
    reason: Reason,
    *,
    is_told_once: bool,
    ways: list[str],
    refused: Sequence[str] = (),
    awaits: str = "",
    also: Callable[[Ledger], None] = lambda _: None,
) -> None:
    # The end of a run, or of its head, is reported once, anything else at each stop.
    nonce = (tick.head or {}).get("nonce", tick.ledger.head_seen)
    is_finished = (tick.head or {}).get("state") == "finished"
    resume = [] if is_finished else [_resume(tick, is_cancelled=bool(refused))]
    how = "Fleet cancelled, as it could not be sent to zero" if refused else "Fleet to zero"
    tells_how = "event" in ways or tick.is_headless
    headline = f"{how}: {reason.sentence}" if tells_how else reason.sentence
    tick.note(
        Note(
            key=f"{reason.sentence} {nonce}" if is_told_once else STOPPED,
            time=tick.now,
            name="to-zero",
            awaits=awaits,
            headline=headline[0].upper() + headline[1:],
            lines=[
                *refused,
                *([ADVICE] if refused else []),
                *reason.reports,
                reason.advice,
                *resume,
            ],
            fields={
                "message": reason.sentence,
                "fleet_id": tick.fleet_id,
                **({"said": list(reason.reports)} if reason.reports else {}),
                **({"refused": list(refused)} if refused else {}),
            },
            ways=ways,
        ),
        again_after=math.inf if is_told_once else CALL_SECONDS,
        also=also,
    )


def tell_given_up(tick: Tick) -> None:
    """Say that a machine gave the run up without marking its head: nothing else would."""
    for instance_id, why in tick.given_up.items():
        note = Note(
            key=f"given up by {instance_id}",
            time=tick.now,
            name="given-up",
            headline=f"{instance_id} gave the run up, and could not mark it failed: {why}",
            lines=["Fix that first.", _resume(tick, is_cancelled=False)],
            fields={},
            ways=["mail"],
        )
        tick.note(note, again_after=math.inf)


def end_instances(tick: Tick) -> None:
    """Terminate instances that their fleet does not want and machines that failed to end."""
    for instance in tick.instances or ():
        why = _why_end(tick, instance)
        if why is not None and _end(tick, instance, why):
            _report_end(tick, instance, why)


def _end(tick: Tick, instance: StackInstance, why: str) -> bool:
    if not tick.does(f"terminate {instance.id}", instance.terminate):
        return False
    tick.done.append(("terminate", f"{instance.id}: {why}"))
    return True


def _why_end(tick: Tick, instance: StackInstance) -> str | None:
    """Return why to end an instance that has had time to end by itself, else None."""
    if not instance.is_live:
        return "it is stopped, and its volumes are billed" if instance.is_stopped else None
    fleet_id, notice, now = tick.fleet_of(instance), tick.settings.notice_seconds, tick.now
    attempt = tick.ledger.attempts.get(instance.id)
    # Of a Spot fleet at zero, Spot instances get a notice, and as much time again here; on-demand
    # ones get none and would keep running.
    if tick.capacity.get(fleet_id) == 0:
        at_zero = now - tick.ledger.at_zero.get(fleet_id, now)
        if at_zero > 2 * notice:
            return f"its fleet ({fleet_id or 'gone'}) has been at zero for {at_zero:.0f} s"
        # A hung one would be in the way of a resume within these minutes.
        silent = silence(tick, [attempt] if attempt and instance.is_on_demand else [])
        if silent > tick.settings.heartbeat_timeout_seconds:
            return f"its fleet is at zero, and it was last heard {silent:.0f} s ago"
    since = tick.ledger.unwanted.get(instance.id, now)
    if now - since > 2 * notice:
        return f"its fleet has had Spot capacity in its place for {now - since:.0f} s"
    if attempt and attempt.failed and now - attempt.failed > notice:
        return f"it failed {now - attempt.failed:.0f} s ago and is still running: {attempt.said}"
    if tick.ledger.events_read == now and instance.id != (tick.head or {}).get("writer"):
        silent = tick.ledger.unheard(instance.id, now)
        if silent > UNHEARD_SECONDS:
            return f"it has not said a word in {silent:.0f} s: {_UNHEARD}"
    return None


def _report_end(tick: Tick, instance: StackInstance, why: str) -> None:
    # One on demand is otherwise ended by the Guard alone.
    ends_itself = not instance.is_on_demand or (tick.head or {}).get("state") in DONE_STATES
    lines = []
    if _UNHEARD in why:
        command = f"aws ec2 get-console-output --output text --instance-id {instance.id}"
        lines = [f"Its console may say more, for an hour: {command}"]
    elif instance.is_live and (ends_itself or "failed" in why):
        lines = ["It should have ended by itself; its events and log may say why it did not."]
    tick.note(
        Note(
            key=f"terminated {instance.id}",
            time=tick.now,
            name="terminated",
            about=instance.id,
            headline=f"Terminated {instance}: {why}",
            lines=lines,
            fields={"message": why, "run_id": instance.run_id},
            ways=["event", "mail"],
        ),
        again_after=math.inf,
        also=lambda ledger: ledger.explain(instance.id, why),
    )
