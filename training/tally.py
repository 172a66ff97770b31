"""Where a workload's own samples account for reads: `timed("read")`, `count("replaced")`."""

from training.durable import Tally

timed, count = Tally.timed, Tally.count
