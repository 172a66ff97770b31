"""The plan's goodput: the share of a paid second that each cause takes, of contract/goodput.py."""

from dataclasses import asdict

from contract.goodput import CAUSES, USEFUL, WAITING
from sizing.plan.size_plan import Plan, idle_at_notice, saving_seconds
from sizing.spot.pattern import NOTICE_ARRIVES


def planned_goodput(plan: Plan) -> dict[str, float]:
    """Return the shares, useful ones among them; none if the run would never end on Spot.

    The work's are the plan's own. What is paid besides is as much as in the simulated runs
    (sizing/spot/forecast.py), divided as one start, the interruptions and their saves weigh.
    """
    spot, work = plan.spot, plan.work
    if spot is None:
        return {}
    phases = [phase for stage in work.stages for phase in stage.phases]
    computing = sum(phase.phase.epochs * phase.waits[0][1] for phase in phases)
    evaluating = sum(stage.evaluation_seconds for stage in work.stages)
    starts, again = spot.interruptions, asdict(plan.restart)
    start = {name: each + starts * again[name] for name, each in asdict(plan.first).items()}
    noticed = NOTICE_ARRIVES if plan.notice.fits else 0.0
    besides = {
        "boot": start["launch"] + start["user_data"] + start["first_step"],
        "sync": start["sync"],
        "restore": start["resume"],
        "data_wait": start["data_wait"],
        "saving": work.seconds
        / spot.interval_seconds
        * saving_seconds(plan.inputs, plan.host, plan.notice),
        "notice": starts * noticed * idle_at_notice(plan.request, plan.notice),
        "repeated": starts * (1 - noticed) * spot.interval_seconds / 2,
    }
    paid = work.seconds / spot.goodput
    factor = max(0.0, paid - work.seconds) / sum(besides.values())
    found = {cause: factor * seconds for cause, seconds in besides.items()}
    found |= {USEFUL: computing, "evaluation": evaluating}
    found["data_wait"] += max(0.0, work.seconds - evaluating - computing)
    found[WAITING] = 3600 * max(0.0, spot.hours_p50 - spot.machine_hours_p50)
    return {cause: found[cause] / paid for cause in CAUSES if found.get(cause)}
