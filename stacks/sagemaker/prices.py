"""Prices of SageMaker training instances, where known: no price list is available here.

The figures are us-east-1's on demand, from public code and listings (ml.g5.2xlarge: a repository's
test against the Pricing API of 2026-07-02); copies of the list disagree. Check with AWS first.
"""

from sizing import catalogue

ON_DEMAND_USD_PER_HOUR = {"ml.g5.xlarge": 1.408, "ml.g5.2xlarge": 1.515, "ml.g5.12xlarge": 7.09}


def price_note(instance_type: str, hours: float, instances: int = 1) -> str:
    """Return one sentence about the cost of at most `hours`, or that it is not known."""
    size = instance_type.removeprefix("ml.")
    instance = catalogue.instances().get(size)
    ec2 = instance.on_demand_usd_per_hour if instance else None
    compared = f"EC2's {size} ${ec2:.3f}" if ec2 else f"no price of EC2's {size} is known"
    usd = ON_DEMAND_USD_PER_HOUR.get(instance_type)
    if usd is None:
        return (
            f"the price of {instance_type} is not known here ({compared} an hour on demand; the g5 "
            "sizes that are known cost 1.25 to 1.40 times EC2's)"
        )
    many = f" on {instances} instances" if instances > 1 else ""
    return (
        f"{instance_type} costs about ${usd:.3f} an hour on demand in us-east-1 ({compared}): at "
        f"most ${usd * hours * instances:.2f} for {hours:g} h{many}; managed Spot costs less, how "
        "much is not known"
    )
