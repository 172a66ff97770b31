"""Facts about EC2: sizes, GPUs, prices and other charges, each with its source.

Promises that nothing here is computed by a model unless it says so. Reads its CSV files; only
refresh.py calls AWS, and only on request. Uses no other package; others use the names below.
"""

from sizing.catalogue.prices import PRICE_REGION, Price, alternates, hourly_price, spot_price
from sizing.catalogue.sizes import NOTED_IMAGE, InstanceType, find, instances

__all__ = [
    "NOTED_IMAGE",
    "PRICE_REGION",
    "InstanceType",
    "Price",
    "alternates",
    "find",
    "hourly_price",
    "instances",
    "spot_price",
]
