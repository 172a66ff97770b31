"""Burstable CPUs: credits earned and spent, and what a day of work costs.

AWS: one credit is one vCPU at 100 % for one minute. A T3 earns a fixed number per hour; any excess
costs $0.05 per vCPU hour (unlimited mode, T3's default).
"""

from dataclasses import dataclass

from sizing import catalogue

USD_PER_SURPLUS_VCPU_HOUR = 0.05
# Credits an hour. nano, micro, small, medium and large were read in AWS's user guide or copies of
# it (unlimited-mode-examples.html; puglieseweb.com; qa.com); the two largest are from memory.
CREDITS_PER_HOUR = {
    "t3.nano": 6,
    "t3.micro": 12,
    "t3.small": 24,
    "t3.medium": 24,
    "t3.large": 36,
    "t3.xlarge": 96,
    "t3.2xlarge": 192,
}
FROM_MEMORY = frozenset({"t3.xlarge", "t3.2xlarge"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """A day of work on a burstable size: credits for the hours it is on, and dollars."""

    baseline_percent: float
    earned: float
    spent: float
    usd: float

    @property
    def surplus(self) -> float:
        """Credits spent beyond those earned, which are billed."""
        return max(0.0, self.spent - self.earned)


def baseline_percent(size: str) -> float:
    """Return the share of each vCPU that the size's credits sustain."""
    return 100 * CREDITS_PER_HOUR[size] / 60 / catalogue.find(size).vcpus


def day_of_work(size: str, *, cpu_percent: float, hours: float, usd_per_hour: float) -> Day:
    """Return the cost of `hours` a day at `cpu_percent` of all vCPUs; off, it earns no credits."""
    vcpus, rate = catalogue.find(size).vcpus, CREDITS_PER_HOUR[size]
    spent, earned = vcpus * cpu_percent / 100 * 60 * hours, rate * hours
    surplus_hours = max(0.0, spent - earned) / 60
    return Day(
        baseline_percent=baseline_percent(size),
        earned=earned,
        spent=spent,
        usd=hours * usd_per_hour + surplus_hours * USD_PER_SURPLUS_VCPU_HOUR,
    )
