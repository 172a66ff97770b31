"""Find a cheaper size for an endpoint from the share of its GPU, or of its CPUs, that it uses.

The candidates would be at most 70 % busy. Modelled by memory bandwidth and half-precision peak, or
by vCPUs: measure before you move, and see `python -m sizing select` for the latency.

python -m sizing rightsize p3.2xlarge --gpu-percent 10
python -m sizing rightsize g5.12xlarge --gpu-percent 15 --gpu-memory-mib 9000
python -m sizing rightsize c5.2xlarge --cpu-percent 12 --memory-gib 3
"""

import argparse

from sizing import catalogue
from sizing.cli.prices import add_price_arguments, ages, answers_of_aws, prices_of
from sizing.cli.tables import print_json, show
from sizing.select.rightsizing import rightsize

HELP = "a cheaper size for an endpoint, from its utilization"
_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("size", help="the size that serves now")
    parser.add_argument("--gpu-percent", type=float, metavar="N", help="GPU utilization")
    parser.add_argument("--cpu-percent", type=float, metavar="N", help="CPU utilization")
    parser.add_argument(
        "--gpu-memory-mib", type=float, metavar="N", help="in use (default: what the size has)"
    )
    parser.add_argument(
        "--memory-gib", type=float, metavar="N", help="in use, of a size without a GPU (as above)"
    )
    add_price_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the sizes that would carry the load for less."""
    instance = catalogue.find(arguments.size)
    has_gpu = instance.num_gpus > 0
    if instance.num_accelerators and not has_gpu:
        raise ValueError(f"{instance.size} has no NVIDIA GPU: its speed cannot be compared")
    percent = arguments.gpu_percent if has_gpu else arguments.cpu_percent
    if percent is None:
        option = "--gpu-percent" if has_gpu else "--cpu-percent"
        raise ValueError(f"give {option}: the share of {instance.size} that is in use")
    memory_mib = arguments.gpu_memory_mib
    if not has_gpu:
        if memory_mib is not None:
            raise ValueError(f"{instance.size} has no GPU: give --memory-gib")
        memory_mib = arguments.memory_gib and arguments.memory_gib * 1024
    answers = answers_of_aws(arguments)
    moves = rightsize(
        instance.size,
        percent,
        lambda size: prices_of(arguments, size, answers),
        memory_mib=memory_mib,
    )
    moved = [move.size for move in moves]
    rows = [
        {
            "size": move.size,
            "usd_per_hour": move.usd_per_hour,
            "busy_percent": round(move.busy_percent, 1),
            "saving_percent": round(move.saving_percent, 1),
            "caution": list(move.cautions),
        }
        for move in moves
    ]
    if arguments.json:
        print_json("rightsize", {"size": instance.size, "in_use_percent": percent, "moves": rows})
        return 0
    notes = [] if rows else [f"no cheaper size carries {percent:g} % of {instance.size}: keep it"]
    notes.append(ages(prices_of(arguments, each, answers)[0] for each in (instance.size, *moved)))
    show(rows[:_SHOWN], title=f"{instance.size} at {percent:g} %: cheaper sizes", notes=notes)
    return 0
