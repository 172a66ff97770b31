"""AWS's charges besides the instance (volumes, addresses, alarms, keys): us-east-1 list prices.

Each figure has its source: public pages, read in 2026-11. None was checked against a bill.
"""

# fmt: off
__all__ = [
    "ALARM_USD_PER_MONTH", "COMPOSITE_ALARM_USD_PER_MONTH", "DASHBOARD_USD_PER_MONTH",
    "HIGH_RESOLUTION_ALARM_USD_PER_MONTH", "HOURS_PER_MONTH", "IMAGE_GIB",
    "INTERFACE_ENDPOINT_USD_PER_HOUR", "KMS_KEY_USD_PER_MONTH", "LAMBDA_ARM_USD_PER_GB_SECOND",
    "LAMBDA_USD_PER_REQUEST", "NAT_GATEWAY_USD_PER_HOUR", "PUBLIC_IPV4_USD_PER_HOUR",
    "ebs_usd_per_hour", "initialization_usd",
]
# fmt: on

HOURS_PER_MONTH = 730

# S3 Standard, first 50 TB: from memory.
S3_USD_PER_GB_MONTH = 0.023

# EBS gp3 (saisci.com 2021-02 after AWS's price page; webuildup.live 2026-04 repeats storage and
# IOPS): the first 3,000 IOPS and 125 MiB/s are included in the volume. The others: from memory,
# io2 at its first 32,000 IOPS, magnetic volumes without their requests.
EBS_USD_PER_GIB_MONTH = {
    "gp3": 0.08, "gp2": 0.10, "io1": 0.125, "io2": 0.125, "st1": 0.045, "sc1": 0.015,
    "standard": 0.05,
}  # fmt: skip
EBS_USD_PER_IOPS_MONTH = {"gp3": 0.005, "io1": 0.065, "io2": 0.065}
GP3_USD_PER_MIB_PER_SECOND_MONTH = 0.04
GP3_FREE_IOPS = 3000
GP3_FREE_MIB_PER_SECOND = 125

# Provisioned Rate for Volume Initialization, once for each volume: dollars per MiB/s and GiB of the
# snapshot's data (github-aws-runners/terraform-aws-github-runner#5165, 2026-06, after example 12
# of AWS's price page: 250 GiB at 200 MiB/s cost $0.60, and a GiB $0.0036 at 300).
INITIALIZATION_USD_PER_GIB_AND_MIB_PER_SECOND = 0.000012
# Data in the snapshot of a PyTorch Deep Learning AMI; 30 to 75 GiB were seen over the years.
IMAGE_GIB = 45

# cloud-horizons 2026-05 and cloudburn 2026-02.
PUBLIC_IPV4_USD_PER_HOUR = 0.005
NAT_GATEWAY_USD_PER_HOUR = 0.045
# Per zone; data processed costs $0.01 per GB (https://aws.amazon.com/privatelink/pricing/, as
# awsnegotiations.com 2026-05 repeats it).
INTERFACE_ENDPOINT_USD_PER_HOUR = 0.01

# c3x.dev and factualminds.com 2026-06; an account's ten free standard alarms and three free
# dashboards are not counted: they may already be used.
ALARM_USD_PER_MONTH = 0.10
HIGH_RESOLUTION_ALARM_USD_PER_MONTH = 0.30
COMPOSITE_ALARM_USD_PER_MONTH = 0.50
DASHBOARD_USD_PER_MONTH = 3.00

# AWS's price pages, from memory.
KMS_KEY_USD_PER_MONTH = 1.00
LAMBDA_ARM_USD_PER_GB_SECOND = 0.0000133334
LAMBDA_USD_PER_REQUEST = 0.20 / 1e6


def ebs_usd_per_hour(gib: float, iops: float, mib_per_second: float, kind: str = "gp3") -> float:
    """Return the dollars that one volume costs per hour; of a kind that is unknown, gp3's."""
    included = GP3_FREE_IOPS if kind == "gp3" else 0
    per_month = (
        gib * EBS_USD_PER_GIB_MONTH.get(kind, EBS_USD_PER_GIB_MONTH["gp3"])
        + max(0.0, iops - included) * EBS_USD_PER_IOPS_MONTH.get(kind, 0.0)
        + max(0.0, mib_per_second - GP3_FREE_MIB_PER_SECOND) * GP3_USD_PER_MIB_PER_SECOND_MONTH
    )
    return per_month / HOURS_PER_MONTH


def initialization_usd(mib_per_second: float, gib: float = IMAGE_GIB) -> float:
    """Return the dollars of loading one volume from its snapshot at this rate; 0 is the default."""
    return gib * mib_per_second * INITIALIZATION_USD_PER_GIB_AND_MIB_PER_SECOND
