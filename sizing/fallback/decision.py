"""The decision: on demand if the deadline is in danger, else the market of least expected cost."""

from sizing.fallback.evidence import Evidence
from sizing.fallback.lookahead import expected_hours
from sizing.fallback.situation import Decision, Situation


def decide(situation: Situation, evidence: Evidence) -> Decision:
    """Choose a market until the next decision."""
    hours = expected_hours(situation, evidence)
    figures = {"slack_seconds": situation.slack, "least_slack_seconds": situation.least_slack}
    figures |= {
        f"usd_{market}": hours * situation.on_demand_per_hour for market, hours in hours.items()
    }
    if situation.is_in_danger:
        return Decision(market="on-demand", reason="danger", figures=figures)
    market = min(hours, key=lambda name: hours[name])
    if situation.place == "spot":
        market = "spot"
    return Decision(market=market, reason="cheapest", figures=figures)
