"""What the Guard does at every call: stop a run that no longer pays, end what runs for nothing."""

import math
from functools import partial

from stacks.guard import fleet
from stacks.guard.fleet import Instance
from stacks.guard.ledger import Ledger, Note
from stacks.guard.reasons import DONE_STATES, Reason, reason_to_stop
from stacks.guard.tick import CALL_SECONDS, Tick


def stop(tick: Tick) -> None:
    """Send the fleet to zero if there is a reason; tell that a run is over, whoever stopped it."""
    reason = reason_to_stop(tick.settings, tick.ledger, tick.head, tick.head_written, tick.now)
    if reason is None:
        return
    is_over = (tick.head or {}).get("state") in DONE_STATES
    # A capacity that could not be read is no reason to let the fleet be.
    if tick.fleet_id and tick.capacity.get(tick.fleet_id) != 0:
        fleet_id = tick.fleet_id
        if not tick.does("fleet to zero", lambda: fleet.send_to_zero(fleet_id)):
            return
        tick.done.append(("to-zero", reason.sentence))
        tick.capacity[fleet_id] = 0
        tick.update(lambda ledger: _stopped(ledger, tick))
        _tell_stop(tick, reason, is_over=is_over, ways=["event", "mail"])
    elif is_over and tick.is_kept:  # without its ledger, each call would tell it again
        _tell_stop(tick, reason, is_over=True, ways=["mail"])


def _stopped(ledger: Ledger, tick: Tick) -> None:
    ledger.stopped = tick.now
    ledger.observe_fleets(tick.capacity, tick.fleet_id, tick.now)


def _tell_stop(tick: Tick, reason: Reason, *, is_over: bool, ways: list[str]) -> None:
    # A run that is over is told once, the rest at each stop.
    nonce = (tick.head or {}).get("nonce", "")
    # A deploy does not raise it: CloudFormation compares templates.
    resume = (
        f"Then go on from the last commit: aws ec2 modify-spot-fleet-request "
        f"--spot-fleet-request-id {tick.fleet_id} --target-capacity 1"
        + (" --on-demand-target-capacity 1" if tick.settings.on_demand_base else "")
    )
    is_finished = (tick.head or {}).get("state") == "finished"
    headline = f"Fleet to zero: {reason.sentence}" if "event" in ways else reason.sentence
    tick.note(
        Note(
            key=f"{reason.sentence} {nonce}" if is_over else "to-zero",
            time=tick.now,
            name="to-zero",
            headline=headline[0].upper() + headline[1:],
            lines=[*reason.said, reason.advice, *([] if is_finished else [resume])],
            fields={
                "message": reason.sentence,
                "fleet_id": tick.fleet_id,
                **({"said": list(reason.said)} if reason.said else {}),
            },
            ways=ways,
        ),
        again_after=math.inf if is_over else CALL_SECONDS,
    )


def end_instances(tick: Tick) -> None:
    """Terminate instances whose fleet does not want them, and machines that could not end."""
    for instance in tick.live():
        why = _why_end(tick, instance)
        if why is None:
            continue
        if tick.does(f"terminate {instance.id}", partial(fleet.terminate, instance.id)):
            tick.done.append(("terminate", f"{instance.id}: {why}"))
            _tell_end(tick, instance, why)


def _why_end(tick: Tick, instance: Instance) -> str | None:
    """Return why an instance is ended, once it has had the time to end by itself."""
    fleet_id, notice, now = tick.fleet_of(instance), tick.settings.notice_seconds, tick.now
    since = tick.ledger.at_zero.get(fleet_id, now)
    # Spot instances get a notice when their fleet's capacity decreases, and as much time again.
    # On-demand instances get none, and would run on.
    if tick.capacity.get(fleet_id) == 0 and now - since > 2 * notice:
        return f"its fleet ({fleet_id or 'gone'}) has been at zero for {now - since:.0f} s"
    since = tick.ledger.unwanted.get(instance.id, now)
    if now - since > 2 * notice:
        return f"its fleet has had Spot capacity in its place for {now - since:.0f} s"
    attempt = tick.ledger.attempts.get(instance.id)
    if attempt and attempt.failed and now - attempt.failed > notice:
        return f"it failed {now - attempt.failed:.0f} s ago and still runs: {attempt.said}"
    return None


def _tell_end(tick: Tick, instance: Instance, why: str) -> None:
    tick.note(
        Note(
            key=f"terminated {instance.id}",
            time=tick.now,
            name="terminated",
            about=instance.id,
            headline=f"Terminated {instance}: {why}",
            lines=["It should have ended by itself; its events and its log may say why not."],
            fields={"message": why, "run_id": instance.run_id},
            ways=["event", "mail"],
        ),
        again_after=math.inf,
    )
