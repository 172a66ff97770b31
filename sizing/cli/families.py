"""What each family of sizes is for, what computes in it, and what it costs.

The level is that of the family's cheapest size: Low under $0.05 an hour, Moderate under $0.50, High
under $2, Very High above.

python -m sizing families
"""

import argparse

from sizing.cli.tables import print_json, show
from sizing.select.families import family_uses

HELP = "families of sizes: use and cost level"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the families, cheapest first."""
    rows = [
        {
            "family": use.family.name,
            "compute": use.compute,
            "fit": sorted(use.family.fit),
            "cost_level": use.level,
            "usd_per_hour_from": use.usd_from,
            "usd_per_hour_to": use.usd_to,
            "use": use.family.what,
        }
        for use in family_uses()
    ]
    if arguments.json:
        print_json("families", {"families": rows})
    else:
        show(rows, notes=["list prices on demand; `python -m sizing catalogue` has every size"])
    return 0
