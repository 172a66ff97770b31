"""The decision: on demand if the deadline is in danger, else the market of least expected cost."""

from sizing.fallback.evidence import Evidence
from sizing.fallback.lookahead import expected_hours
from sizing.fallback.situation import Decision, Situation


def decide(situation: Situation, evidence: Evidence) -> Decision:
    """Choose a market until the next decision, with the figures that led to it."""
    hours = expected_hours(situation, evidence)
    usd = {market: each * situation.on_demand_per_hour for market, each in hours.items()}
    figures = {
        "hours_to_deadline": (situation.deadline - situation.now) / 3600,
        "hours_left": situation.left / 3600,
        "slack_hours": situation.slack / 3600,
        "least_slack_hours": situation.least_slack / 3600,
        "spot_losses_per_hour": evidence.losses_per_hour,
        "spot_arrivals_per_hour": evidence.arrivals_per_hour,
        **{f"usd_{market.replace('-', '_')}": each for market, each in usd.items()},
    }
    if situation.is_in_danger:
        reason = (
            f"the deadline is in danger: {situation.slack / 60:.1f} min may pass without progress, "
            f"and {situation.least_slack / 60:.1f} must remain"
        )
        return Decision(market="on-demand", reason=reason, figures=figures)
    # A machine on Spot that is not in danger trains on: leaving it never pays.
    market = "spot" if situation.place == "spot" else min(usd, key=lambda name: usd[name])
    expected = ", ".join(f"{name} ${each:.2f}" for name, each in usd.items())
    return Decision(market=market, reason=f"expected until the end: {expected}", figures=figures)
