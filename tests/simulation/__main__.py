"""Live through seeds: python -m tests.simulation --seed N --story, or --seeds A..B."""

import argparse
import sys
import time

from tests.simulation.life import live_through, simulated
from tests.simulation.plan import draw
from tests.simulation.story import shortened, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", help="A..B, both included")
    parser.add_argument("--fleet", choices=["spot", "asg"], help="of all seeds; else drawn")
    parser.add_argument("--story", action="store_true", help="what happened, shrunk if it failed")
    arguments = parser.parse_args()
    first, _, last = (arguments.seeds or f"{arguments.seed}").partition("..")
    seeds = range(int(first), int(last or first) + 1)
    began, cpu = time.monotonic(), time.process_time()
    hours, num, failed = 0.0, 0, []
    with simulated():
        for seed in seeds:
            found = live_through(draw(seed, arguments.fleet))
            hours, num = hours + found.hours, num + 1
            if found.broken:
                failed.append(seed)
                print(f"seed {seed}, {found.plan.fleet}: {'; '.join(found.broken)[:600]}")
            if arguments.story:
                found = shrink(found) if found.broken else found
                print("\n".join(shortened(found)))
            if num % 20 == 0:
                _report(num, hours, time.process_time() - cpu, time.monotonic() - began, failed)
    _report(num, hours, time.process_time() - cpu, time.monotonic() - began, failed)
    return 1 if failed else 0


def _report(num: int, hours: float, cpu: float, wall: float, failed: list[int]) -> None:
    print(
        f"{num} seeds, {len(failed)} failed {failed[:20]}: {hours:.0f} machine hours in {cpu:.1f} "
        f"CPU seconds ({hours / cpu:.0f} per second), {num / wall * 60:.0f} seeds a minute",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
