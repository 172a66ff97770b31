"""Sweeps for `runs`: a table of their runs; stop and resume for all that are unfinished.

A sweep's jobs are those in its jobs.json (stacks/sagemaker); a sweep in a folder has none.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.keys import SWEEP, SWEEP_JOBS, SWEEPS
from operate.control import carry_out, say, stop_process
from operate.runs import run_buckets
from stacks import JobState, QueuedSweep
from training.durable import SweptRuns, open_store

_POLL_SECONDS = 2.0
_QUEUED = ("SUBMITTED", "PENDING", "RUNNABLE")


@dataclass(frozen=True, kw_only=True)
class OperatedSweep:
    """One sweep, and the jobs that were queued for its runs."""

    found: SweptRuns
    queued: QueuedSweep | None
    states: Mapping[str, Sequence[JobState]] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """The URI under which its runs are stored."""
        return self.found.store.uri

    @property
    def id(self) -> str:
        """The last part of its URI."""
        return self.uri.rpartition("/")[2]

    @cached_property
    def swept(self) -> SweptRuns:
        """Its runs in their current state, with the cost of each."""
        usd = {
            run: None if any(each.usd is None for each in jobs) else sum(j.usd or 0.0 for j in jobs)
            for run, jobs in self.states.items()
        }
        return replace(self.found, usd=usd)

    def rows(self) -> list[dict[str, Any]]:
        """Return its table: each run's state, best metric and dollars so far."""
        rows = []
        for one in self.swept.runs:
            row, jobs = one.row(), self.states.get(one.run.name, [])
            if jobs and row["state"] not in ("finished", "failed") and not jobs[-1].is_over:
                row["state"] = "queued" if jobs[-1].status in _QUEUED else "running"
            elif jobs and row["state"] == "running":
                row["state"] = "interrupted"
            no_job = 0.0 if row["state"] == "not started" else None
            rows.append({**row, "usd": self.swept.usd.get(one.run.name, no_job)})
        return rows

    def live(self) -> list[tuple[str, str]]:
        """Return run and ID of each job that is not over, the last in the queue first."""
        assert self.queued is not None
        return [
            (run, job)
            for run, ids in reversed(self.queued.jobs.items())
            for job, state in zip(ids, self.states[run], strict=True)
            if not state.is_over
        ]


def find_operated_sweep(name: str | None) -> OperatedSweep | None:
    """Return the sweep with this name, URI or folder; None if there is no such sweep."""
    if not name:
        return None
    name = name.rstrip("/")
    if "://" in name or (Path(name) / SWEEP).is_file():
        uris = [name if "://" in name else str(Path(name).resolve())]
    elif "/" in name or Path(name).exists():
        return None
    else:
        # Listed, not read: a user who may read only runs can then still ask for a run by its ID.
        places = [f"s3://{bucket}/{SWEEPS.rstrip('/')}" for bucket in run_buckets()]
        uris = [f"{each}/{name}" for each in places if name in open_store(each).folders("")]
    found = [sweep for uri in uris if (sweep := SweptRuns.at(uri)) is not None]
    if len(found) > 1:  # of teams with prefixes of their own
        raise UserError(f"which sweep is {name}? {', '.join(each.store.uri for each in found)}")
    return _look(found[0]) if found else None


def _look(found: SweptRuns) -> OperatedSweep:
    kept = found.store.get(SWEEP_JOBS)
    if kept is None:
        return OperatedSweep(found=found, queued=None)
    queued = QueuedSweep.from_bytes(kept.data, f"{found.store.uri}/{SWEEP_JOBS}")
    return OperatedSweep(found=found, queued=queued, states=queued.look())


def stop_sweep(sweep: OperatedSweep, reason: str) -> dict[str, Any]:
    """End its jobs, waiting ones first, until none is left; those that train save first."""
    if sweep.queued is None:
        if "://" in sweep.uri:
            raise UserError(f"no job was queued for {sweep.uri}")
        stop_process(Path(sweep.uri))
        return {"run": sweep.id, "done": "is stopped, its runs saved"}
    num_ended = 0
    while live := sweep.live():  # somebody may still be queueing it
        assert sweep.queued is not None
        sweep.queued.end([job for _, job in live], reason or "runs stop")
        say(f"{len(live)} jobs are asked to end; running ones save first: SageMaker takes 120 s")
        while any(not each.is_over for jobs in sweep.queued.look().values() for each in jobs):
            time.sleep(_POLL_SECONDS)
        num_ended += len(live)
        sweep = _look(sweep.found)
    return {"run": sweep.id, "done": f"is stopped: {num_ended} jobs have ended"}


def resume_sweep(sweep: OperatedSweep, reason: str) -> dict[str, Any]:
    """Queue again, with the same arguments, the runs that are unfinished and have no job."""
    if sweep.queued is None:
        if all(row["state"] == "finished" for row in sweep.rows()):
            raise UserError(f"every run of {sweep.id} has finished: there is nothing to resume")
        say("now start its command again: the same `python -m training sweep`")
    else:
        from stacks import sagemaker_command

        carry_out(sagemaker_command, sweep.queued.arguments)
    when = "" if sweep.queued else " once started again"
    return {"run": sweep.id, "done": f"resumes what is unfinished{when}"}


def open_sweep(sweep: OperatedSweep) -> dict[str, Any]:
    """Write its report now, and return where it is."""
    verdict = sweep.swept.write_report()
    return {"run": sweep.id, "done": f"has its report in {sweep.uri}/report.html: {verdict}"}
