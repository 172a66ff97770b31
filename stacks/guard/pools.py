"""What Spot did to the account's runs, kept for plans, and a rest for pools that lost machines.

The breaker: a pool that lost machines in short order, in any run of the bucket, rests for about an
hour, while the fleet requests its machine in others. A run that waits may have it back at once.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from botocore.exceptions import BotoCoreError, ClientError

from sizing import PoolHistory, PoolRecord
from stacks.guard import fleet, records
from stacks.guard.ledger import Ledger, MachineAttempt
from stacks.guard.tick import Tick

NAME = "pools"
# A wait this long is worse than a pool that loses machines.
PATIENCE_SECONDS = 600.0
# The key of a refusal: the run goes on as without this, and asks again a day later.
REFUSED, DAY = "pools refused", 86_400.0


def prefer_calm_pools(tick: Tick) -> None:
    """Keep what this run saw of Spot, and offer the fleet the pools that do not rest."""
    settings, fleet_id, ledger = tick.settings, tick.fleet_id, tick.ledger
    history = PoolHistory({settings.run_id: seen_pools(ledger.attempts)})
    with suppress(BotoCoreError, ClientError):  # nothing needs it
        history = records.share_pools(settings, history)
    if not (fleet_id and settings.subnets and tick.is_kept and tick.capacity.get(fleet_id)):
        return
    every = history.pools
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
    calm.sort(key=lambda place: every.get(pools[place], PoolRecord()).losses_per_hour)
    resting = sorted({*pools.values()} - {pools[place] for place in calm}) if calm else []
    own_fleet = fleet.StackFleet.of(fleet_id)
    has_machines = tick.instances is None or bool(tick.live())  # while EC2 says nothing, it may
    is_free = not (resting and own_fleet.ends_what_it_loses and has_machines)
    if resting == ledger.resting or not is_free or tick.now - ledger.done.get(REFUSED, 0) < DAY:
        return
    # Whatever becomes of this call, a later one offers them again unless it knows what was taken.
    before = ledger.resting
    tick.update(lambda ledger: setattr(ledger, "resting", [*resting, "asked"]))
    offer = partial(own_fleet.offer, calm or list(pools))
    refusal = tick.known("pools", partial(fleet.refusal_of, offer))
    if refusal is not None:

        def keep(ledger: Ledger) -> None:
            ledger.resting = before if refusal else resting
            ledger.done |= {REFUSED: tick.now} if refusal else {}

        tick.update(keep)
        tick.done.append((NAME, refusal or f"resting: {', '.join(resting) or 'none'}"))


def seen_pools(attempts: Mapping[str, MachineAttempt]) -> dict[str, PoolRecord]:
    """Return what a run's machines on Spot met, by pool."""
    found: dict[str, PoolRecord] = {}
    for each in attempts.values():
        if each.market == fleet.SPOT and each.zone:
            name = PoolHistory.name(each.size, each.zone)
            lost, waited = float(each.is_lost), each.waited / 3600
            record = PoolRecord(at=each.seen, up_hours=each.hours, losses=lost, recent=lost,
                                waits=1.0, wait_hours=waited)  # fmt: skip
            found[name] = found.get(name, PoolRecord()) + record
    return found
