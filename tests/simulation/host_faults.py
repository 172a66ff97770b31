"""Faults of several hosts, each planted by one patch: python -m tests.simulation.host_faults 1..40.

Each names a word of the promise that it breaks, as in faults.py.
"""

from collections.abc import Mapping

from tests.simulation.faults import Fault, _fault, _nothing, _text, print_rates
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
    "no end to what is repeated": _text(
        ranks_file, "_probe", "if hasattr(socket, name):", 'if "USER" not in name:', "work goes on"
    ),
    "facts are not compared": _text(
        ranks_file, "_gather", "if theirs.get(what) != facts.get(what):", "if False:", "same data"
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
    "others' losses are counted": _text(
        RankEnvironment, "meeting", "partial(report, code=Exit.INTERRUPTED)", "report",
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
    """Print each fault's rate."""
    with simulated_job():
        print_rates(FAULTS, lambda seed, _: live_through_job(draw(seed)).broken)


if __name__ == "__main__":
    main()
