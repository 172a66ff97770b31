"""What Spot did to the account's runs, kept for plans, and a rest for pools that lost machines.

The breaker: a pool that lost machines in short order, in any run of the bucket, rests for about an
hour, while the fleet requests its machine in others. A run that waits may have it back at once.
"""

from collections.abc import Mapping
from functools import partial

from sizing import PoolHistory, PoolRecord
from stacks.guard import fleet, records
from stacks.guard.ledger import Ledger, MachineAttempt, Note
from stacks.guard.tick import Tick

NAME = "pools"
# A wait this long is worse than a pool that loses machines.
PATIENCE_SECONDS = 600.0
# The key of a refusal: the run goes on as without this, and asks again a day later.
REFUSED, DAY = "pools refused", 86_400.0


def prefer_calm_pools(tick: Tick) -> None:
    """Keep what this run saw of Spot, and offer the fleet the pools that do not rest."""
    settings, fleet_id, ledger = tick.settings, tick.fleet_id, tick.ledger
    own = seen_pools(ledger.attempts)
    kept = tick.known("Spot pools", partial(records.share_pools, settings, own))
    if not (fleet_id and settings.subnets and tick.is_kept and tick.capacity.get(fleet_id)):
        return
    every = (kept or PoolHistory({settings.run_id: own})).pools
    resting = [name for name, seen in every.items() if seen.is_resting(tick.now)]
    if ledger.waiting and tick.now - ledger.waiting > PATIENCE_SECONDS:
        resting = []
    if not (resting or ledger.resting):
        return
    zones = tick.known("zones", partial(fleet.zones_of, settings.subnets))
    if zones is None:
        return
    pools = {(size, subnet): next((name for name in names if name in every), names[0])
             for size in settings.prices for subnet, ways in zones.items()
             for names in [[PoolHistory.name(size, zone) for zone in ways]]}  # fmt: skip
    calm = [place for place, name in pools.items() if name not in resting]
    calm.sort(key=lambda place: _losses_per_hour(every, pools[place]))
    resting = sorted({*pools.values()} - {pools[place] for place in calm}) if calm else []
    own_fleet = fleet.StackFleet.of(fleet_id)
    is_free = not (resting and own_fleet.ends_what_it_loses and tick.live())
    if resting == ledger.resting or not is_free or tick.now - ledger.done.get(REFUSED, 0) < DAY:
        return
    offer = partial(own_fleet.offer, calm or list(pools))
    refusal = tick.known("pools", partial(fleet.refusal_of, offer))
    if refusal is not None:
        tick.done.append((NAME, refusal or ", ".join(resting) or "every pool"))
        tick.update(lambda kept: _keep(kept, tick.now, resting, refusal))


def seen_pools(attempts: Mapping[str, MachineAttempt]) -> dict[str, PoolRecord]:
    """Return what a run's machines on Spot met, by pool."""
    found: dict[str, PoolRecord] = {}
    for each in attempts.values():
        if each.market == fleet.SPOT and each.zone:
            name = PoolHistory.name(each.size, each.zone)
            record = PoolRecord(
                at=each.seen,
                up_hours=each.hours,
                losses=float(each.is_lost),
                wait_hours=each.waited / 3600,
                waits=1.0,
                recent=float(each.is_lost),
            )
            found[name] = found.get(name, PoolRecord()) + record
    return found


def _losses_per_hour(every: Mapping[str, PoolRecord], name: str) -> float:
    seen = every.get(name, PoolRecord())
    return (seen.losses + 0.5) / (seen.up_hours + 1.0)


def _keep(ledger: Ledger, now: float, resting: list[str], refusal: str) -> None:
    if ledger.resting == resting:  # by a call at the same time
        return
    message = f"{', '.join(resting)} lost machines in short order and rest" if resting else ""
    message = message or "the fleet may use every pool again"
    if refusal:
        ledger.done[REFUSED] = now
        message = f"pools stay as they are, EC2 refuses: {refusal}"
    else:
        ledger.resting = resting
    fields = {"message": message, "resting": ledger.resting}
    note = Note(key=f"{NAME} {now:.0f}", time=now, name=NAME, headline=message, lines=[],
                fields=fields, ways=["event"])  # fmt: skip
    ledger.notes.append(note)
