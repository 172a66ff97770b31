"""Facts about EC2: sizes, GPUs, prices and other charges, each with its source.

Promises that nothing here is computed by a model unless it says so. Reads its CSV files; only
refresh.py calls AWS, and only on request. Uses no other room. Other packages use the names below.
"""

from sizing.catalogue.prices import PRICE_REGION, Price, age_note, hourly_price, spot_price
from sizing.catalogue.sizes import (
    AMI_FAMILIES,
    MAX_ALTERNATES,
    Family,
    InstanceType,
    alternates,
    families,
    find,
    instances,
    trainable_by_price,
)

__all__ = [
    "AMI_FAMILIES",
    "MAX_ALTERNATES",
    "PRICE_REGION",
    "Family",
    "InstanceType",
    "Price",
    "age_note",
    "alternates",
    "families",
    "find",
    "hourly_price",
    "instances",
    "spot_price",
    "trainable_by_price",
]
