"""Faults of several hosts, each planted by one patch: python -m tests.simulation.host_faults 1..40.

Each names a word of the promise that it breaks, as in faults.py.
"""

import logging
import sys
import time
from collections.abc import Mapping

from tests.simulation.faults import Fault, _fault, _nothing, _text
from tests.simulation.hosts import draw, live_through_job, simulated_job
from training.cli import run as run_file
from training.cli import sagemaker
from training.durable.attempt import ranks as ranks_file
from training.durable.attempt.ranks import _Meeting
from training.durable.attempt.supervisor import _LastResort
from training.durable.attempt.world import RankEnvironment, World
from training.engine.attempt import _WorkloadJob

FAULTS: Mapping[str, Fault] = {
    "a lost host that nobody watches": _fault(_Meeting, "watch", _nothing, "a lost host"),
    "no probes": _fault(ranks_file, "_probe", _nothing, "a lost host"),
    "facts are not compared": _text(
        ranks_file, "_gather", "if theirs.get(what) != fact]", "if False]", "same data"
    ),
    "75 is not waited for": _text(
        sagemaker._Command, "run",
        "if code == Exit.INTERRUPTED and self.terminated_at is None:", "if False:",
        "a job fails for a cause",
    ),
    "no wait for the end": _text(
        sagemaker, "_await_the_end", "> 0:", "> 140:", "a job fails for a cause"
    ),
    "SIGTERM is not passed on": _text(
        sagemaker._Command, "_pass_on",
        "self._process is not None and", "False and", "loses no step",
    ),
    "one failure ends the job": _fault(
        sagemaker._Command.__init__, "__defaults__",
        (sagemaker._Command.__init__.__defaults__[0], 1, None),  # type: ignore[index]
        "a job fails for a cause",
    ),
    "two leaders": _text(
        RankEnvironment, "meeting", "rank, address = self.hosts.number * num_here,",
        "rank, address = 0,",
    ),
    "an end in order is a loss": _text(
        ranks_file._Meeting, "_listen", "if end == _LEFT:", "if False:", "for a cause"
    ),
    "a finished host is lost": _text(
        RankEnvironment, "meeting", "stack.callback(supervisor.last_resort.stand_down)", "pass",
    ),
    "the leader waits without its others": _text(
        ranks_file, "_gather", "for name in hosts.names[1:]", "for name in hosts.names[1:2]",
    ),
    "no time for the meeting": _fault(ranks_file.Hosts, "meeting_seconds", 5.0),
    "a finished run is met for": _fault(
        run_file, "_is_same_finished_run", lambda *_: False
    ),
    "no exit after a lost host": _fault(_LastResort, "fail", _nothing, "a lost host"),
    "an end waits for who is gone": _fault(_LastResort, "end_without", _nothing, "after the end"),
    "ranks leave without waiting": _text(
        World, "leaving", "except InterruptedRunError:\n        self.close()",
        "except InterruptedRunError:\n        pass",
    ),
    "rank 0 alone ends while all wait": _text(
        _WorkloadJob, "lead", "self._world.share((code, None))", "pass"
    ),
}  # fmt: skip


def main() -> None:
    """Print each fault's rate; it is tried on no more seeds once three have found it."""
    logging.disable(logging.CRITICAL)
    first, _, last = sys.argv[1].partition("..")
    with simulated_job():
        for name, fault in FAULTS.items():
            if sys.argv[2:] and not any(word in name for word in sys.argv[2:]):
                continue
            began, found, promises, tried = time.process_time(), list[int](), set[str](), 0
            with fault.plant():
                for seed in range(int(first), int(last) + 1):
                    broken = live_through_job(draw(seed)).broken
                    tried += 1
                    if broken and fault.is_found(broken):
                        found.append(seed)
                        promises |= {each.partition(":")[0] for each in broken}
                    if len(found) == 3:
                        break
            seconds = time.process_time() - began
            kinds = ", ".join(sorted(promises))
            print(
                f"| {name} | {len(found)} of {tried} | {found} | {kinds} | {seconds:.0f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
