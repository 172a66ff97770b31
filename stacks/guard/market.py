"""Spot or on demand: what the fleet requests, decided at each call of a run with a deadline.

sizing/fallback decides, from the run's facts, and plans replay its decisions; this module carries
them out. A trainer that is moved gets a notice or an orderly shutdown, and saves.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from sizing import Decision, Market, Place, Situation, SpotHistory, decide_market, observe_market
from stacks.guard.fleet import ON_DEMAND, SPOT, StackFleet, StackInstance
from stacks.guard.ledger import Ledger, Note
from stacks.guard.settings import Forecast
from stacks.guard.tick import Tick

NAME = "market"
WORDS: dict[Market, str] = {
    "spot": "Spot",
    "bridge": "on demand until Spot comes",
    "on-demand": "on demand",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkLeft:
    """Seconds of work left at the last commit, and what the figure is based on."""

    left: float
    basis: str


def choose_market(tick: Tick) -> None:
    """Choose and request the fleet's capacity; without a deadline, keep the template's."""
    settings, fleet_id = tick.settings, tick.fleet_id
    # Change nothing if facts could not be read or the fleet is at zero, even by this very call.
    if tick.instances is None or tick.head is None or not tick.is_kept:
        return
    if not fleet_id or not tick.capacity.get(fleet_id):
        return
    if not settings.deadline_hours or settings.forecast is None:
        _take_back(tick, fleet_id)
        return
    asks = tick.capacity[fleet_id] > tick.on_demand[fleet_id]
    machines = [each for each in tick.live() if tick.fleet_of(each) == fleet_id]
    launches = [each.launched for each in tick.ledger.attempts.values()]
    began = tick.ledger.market.get("began") or min([tick.now, *launches])
    work = work_left(tick.head, settings.forecast)
    situation = _situation(tick, machines, work, began=began, asks=asks)
    evidence = _observed(tick.ledger, situation)
    decision = decide_market(situation, evidence)
    if tick.ledger.is_barren_on_spot(settings):
        reason = f"{len(tick.ledger.barren_attempts())} attempts in a row on Spot committed nothing"
        decision = replace(decision, market="on-demand", reason=reason)
    tick.update(lambda ledger: _keep(ledger, tick.now, began, situation, decision, work))
    _carry_out(tick, fleet_id, machines, decision)


def work_left(head: Mapping[str, Any], forecast: Forecast) -> WorkLeft:
    """Return the work left by the newest commit: its stage as measured, the others as planned.

    Later stages, of which nothing is measured, count at p90 to keep the deadline.
    """
    planned = {**forecast.stages, **forecast.slow_stages}
    everything = sum(planned.values())
    if not head.get("checkpoints"):
        return WorkLeft(left=everything, basis="planned, nothing is committed yet")
    newest, names = head["checkpoints"][-1], list(planned)
    stage, measured = newest["stage"], newest.get("seconds_left")
    if stage not in names:
        # Which stages are still to come is unknown.
        return WorkLeft(left=everything, basis=f"planned, the plan has no stage {stage!r}")
    later = sum(planned[name] for name in names[names.index(stage) + 1 :])
    if measured is None:
        return WorkLeft(left=planned[stage] + later, basis="planned, no pace measured yet")
    basis = "measured, later stages planned" if later else "measured"
    return WorkLeft(left=float(measured) + later, basis=basis)


def _situation(
    tick: Tick, machines: list[StackInstance], work: WorkLeft, *, began: float, asks: bool
) -> Situation:
    """Return what is known now; times count from the run's start."""
    settings, forecast = tick.settings, tick.settings.forecast
    assert forecast is not None
    spot = [each for each in machines if each.market == SPOT and each.is_running]
    demand = [each for each in machines if each.market == ON_DEMAND]
    place: Place = "on-demand" if demand else "spot" if spot else "none"
    size = next(iter(settings.prices))
    return Situation(
        now=tick.now - began,
        deadline=settings.deadline_hours * 3600,
        work=max(work.left, forecast.seconds),
        left=max(0.0, work.left - _trained(tick, demand or spot, forecast)),
        committed_left=work.left,
        place=place,
        spot_machine=spot[-1].id if spot else None,
        asks_for_spot=asks,
        restart=forecast.restart_seconds,
        save=forecast.save_seconds,
        interval=forecast.interval_seconds,
        until_next=settings.call_every_seconds,
        spot_per_hour=settings.usd_per_hour(size, SPOT),
        on_demand_per_hour=settings.usd_per_hour(size, ON_DEMAND),
    )


def _trained(tick: Tick, machines: list[StackInstance], forecast: Forecast) -> float:
    """Return the seconds probably trained since the last commit: at most one commit's worth."""
    if not machines:
        return 0.0
    start = min(each.launched for each in machines) + forecast.restart_seconds
    since = max(tick.ledger.committed, start)
    return min(max(0.0, tick.now - since), forecast.interval_seconds)


def _observed(ledger: Ledger, now: Situation) -> SpotHistory:
    before = SpotHistory(**ledger.market.get("evidence", {}))
    return observe_market(before, seconds=now.now, machine=now.spot_machine, asks=now.asks_for_spot)


def _keep(
    ledger: Ledger,
    now: float,
    began: float,
    situation: Situation,
    decision: Decision,
    work: WorkLeft,
) -> None:
    """Keep what the next call needs and report a change; only one of concurrent calls reports."""
    kept = ledger.market
    if kept.get("evidence", {}).get("seconds", -1.0) >= situation.now:
        return
    moves = kept.get("moves", 0)
    if decision.market != kept.get("market", "spot"):
        moves += 1
        message = f"{WORDS[decision.market]}: {decision.reason}; work left: {work.basis}"
        figures = {name: round(value, 4) for name, value in decision.figures.items()}
        ledger.notes.append(_note(now, moves, message, {"market": decision.market, **figures}))
    ledger.market = {
        "base": 0,  # the template's, with any deadline
        "began": began,
        "market": decision.market,
        "moves": moves,
        "evidence": asdict(_observed(ledger, situation)),
    }


def _note(now: float, move: int, message: str, figures: dict[str, Any]) -> Note:
    return Note(
        key=f"{NAME} {move}",
        time=now,
        name=NAME,
        headline=f"The run goes {message}",
        lines=[],
        fields={"message": message, "move": move, **figures},
        ways=["event"],
    )


def _carry_out(
    tick: Tick, fleet_id: str, machines: list[StackInstance], decision: Decision
) -> None:
    """Set the fleet's capacity, and end on-demand machines when Spot is chosen.

    A decrease of the capacity ends Spot machines only; it leaves on-demand ones alone.
    """
    demand = [each for each in machines if each.market == ON_DEMAND]
    is_there = any(each.is_running for each in demand)
    # A bridge's machine is no longer requested once it runs: it stays, and Spot joins it.
    on_demand = int(
        decision.market == "on-demand" or (decision.market == "bridge" and not is_there)
    )
    # EC2 may have none on demand: until one runs, Spot keeps training or is requested as well.
    spot = int(decision.market != "on-demand" or not is_there)
    ended = SPOT if not spot else ON_DEMAND if decision.market == "spot" else None
    if leaving := [each.id for each in machines if each.market == ended]:
        tick.update(lambda ledger: ledger.take_back(leaving))
    why = f"{WORDS[decision.market]}: {decision.reason}"
    if not _ask_for(tick, fleet_id, spot + on_demand, on_demand, why):
        return
    for instance in demand if decision.market == "spot" else ():
        if tick.does(f"terminate {instance.id}", instance.terminate):
            tick.done.append((NAME, f"{instance.id} ends: {decision.reason}"))


def _take_back(tick: Tick, fleet_id: str) -> None:
    """Undo the Guard's own choice once a deploy has dropped the deadline.

    A deploy with another base is carried out for groups, too, whose templates have none. An
    on-demand machine trains until Spot is there, and then ends (see Tick.unwanted).
    """
    base, kept = tick.settings.on_demand_base, tick.ledger.market
    # Before any call knew a base, the fleet's own counts. A deploy of another launch template sets
    # MinSize to 0, and so asks for the machine that only stays, besides the one on Spot.
    is_changed = StackFleet.of(fleet_id).ends_what_it_loses and (
        kept.get("base", tick.on_demand[fleet_id]) != base or tick.capacity[fleet_id] > 1
    )
    message = f"as the template has it: on_demand_base is {base}"
    if is_moved := kept.get("market", "spot") != "spot":
        message = "as the template has it: the run no longer has a deadline"
    if is_moved or is_changed:
        leaving = [each.id for each in tick.live() if base and each.market == SPOT]
        tick.update(lambda ledger: ledger.take_back(leaving))
        if not _ask_for(tick, fleet_id, 1, base, message):
            return
    if is_moved or kept.get("base") != base:
        tick.update(lambda ledger: _forget(ledger, tick.now, base, message))


def _forget(ledger: Ledger, now: float, base: int, message: str) -> None:
    ledger.market = {**ledger.market, "base": base}
    if ledger.market.get("market", "spot") != "spot":
        moves = ledger.market["moves"] + 1
        ledger.market = {**ledger.market, "market": "spot", "moves": moves}
        ledger.notes.append(_note(now, moves, message, {"market": "spot"}))


def _ask_for(tick: Tick, fleet_id: str, capacity: int, on_demand: int, why: str) -> bool:
    """Request this capacity unless it is already set; return whether it is set now."""
    if (tick.capacity[fleet_id], tick.on_demand[fleet_id]) == (capacity, on_demand):
        return True
    own = StackFleet.of(fleet_id)
    # Somebody may have stopped the run since this call looked.
    if not tick.known("fleet", lambda: own.read_capacity()[0]):
        return False
    if not tick.does("on-demand capacity", partial(own.set_capacity, capacity, on_demand)):
        return False
    tick.done.append((NAME, why))
    return True
