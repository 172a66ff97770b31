"""One attempt of a run, by the process that holds its lease: from the lease to the receipt.

It ends in one of five ways, which are the exit codes: finished, failed, interrupted and saved,
lease lost, or refused because of a user's mistake. What is trained is a `Job`: the stages of a
workload (training/engine) or a program (training/program). Imports no torch.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from training.attempt.supervisor import Supervisor
from training.errors import EXIT_FAILED, EXIT_FINISHED, RunFailedError
from training.record.checkpoint_entry import KEEP_NEWEST, Retention
from training.record.events import Events
from training.record.head import Head
from training.record.lease import Lease, LeaseLostError
from training.record.metrics import Metrics
from training.record.reopen import with_way_back
from training.record.run_config import RunConfig, ensure_run_config, now_utc
from training.report.receipt import RunResult, conclude, write_receipt
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOptions:
    """What the command line decides about one attempt, whatever it trains."""

    store: Store
    run_id: str
    writer: str
    scratch: Path
    retention: Retention = KEEP_NEWEST
    lease_ttl_seconds: float = 30.0
    metrics_file: Path | None = None
    bundle_uri: str | None = None
    prediction: Mapping[str, float | str] | None = None
    usd_per_hour: float | None = None

    def run_config(self, **what: Any) -> RunConfig:
        """What config.json says of the run, if this is its first attempt; `what` is the job's."""
        return RunConfig(
            run_id=self.run_id,
            bundle_uri=self.bundle_uri,
            writer=self.writer,
            created_at=now_utc(),
            prediction=self.prediction,
            **what,
        )


class Job(Protocol):
    """What an attempt trains."""

    placement: frozenset[str]  # the fields of its config that may differ between attempts
    ranks: int | None  # that train it in this attempt; None: its own business

    def run_config(self) -> RunConfig:
        """What config.json says of the run, if this is its first attempt."""

    def train(self, run: "HeldRun") -> RunResult:
        """Restore the last commit, then sweep, and train to the end; any other end is raised.

        Not before: a machine that cannot read what was committed deletes nothing.
        """


class HeldRun:
    """A run while this process holds its lease: its records, and how they are closed."""

    def __init__(
        self,
        options: AttemptOptions,
        supervisor: Supervisor,
        lease: Lease,
        record: RunConfig,
        ranks: int | None,
    ) -> None:
        head = lease.head
        self.store = options.store
        self.lease = lease
        self.record = record
        self.supervisor = supervisor
        self.events = Events(options.store, options.writer)
        self.metrics = Metrics(options.store, head.generation, head.nonce, options.metrics_file)
        known = {"usd_per_hour": options.usd_per_hour, "ranks": ranks}
        self._known = {name: value for name, value in known.items() if value is not None}

    @property
    def generation(self) -> int:
        """This attempt's number, from 1."""
        return self.lease.head.generation

    def begin(self) -> None:
        """Tell of the take-over, and keep the lease."""
        self._tell_take_over()
        self.lease.start_heartbeat()

    def begin_generation(self, skipped_steps: tuple[int, ...]) -> None:
        """Go on as the next attempt would, in the same process and without these steps."""
        self.metrics.flush()
        self.lease.begin_generation(skipped_steps)
        self.metrics.begin_generation(self.generation, self.lease.head.nonce)
        self._tell_take_over()

    def finish(self, result: RunResult) -> None:
        """Write the receipt and mark the run finished."""
        self.metrics.flush()
        write_receipt(self.store, self.lease, self.record, result, self.supervisor.began)
        weights = result.weights_sha256
        self.events.emit("finished", "ok", step=result.steps, weights_sha256=weights)
        self.lease.finish(weights)
        _log.info("[ok] finished: %d steps, weights %s", result.steps, weights)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Release the lease, flush the metrics and write the report, however the attempt ends."""
        try:
            yield
        except RunFailedError as error:
            self.metrics.flush()
            reason = with_way_back(str(error), self.store.uri)
            self.events.emit("failed", "failed", message=reason)
            self.lease.fail(reason)
            _log.error("[failed] the run has failed: %s", reason)
            raise
        finally:
            self.supervisor.last_resort.stand_down()
            # What ends the attempt is more telling than a release that did not work either.
            with contextlib.suppress(LeaseLostError, StoreError):
                self.lease.release()
            with contextlib.suppress(StoreError):
                self.metrics.flush()
            if self.lease.head.state == "released":
                self.events.emit("released", "ok", generation=self.generation)
            self.lease.close()
            self.metrics.close()
            conclude(self.store, self.record, self.lease.head)

    def _tell_take_over(self) -> None:
        """Write the event of a new generation, with price and ranks for report and receipt."""
        self.events.emit("take-over", "ok", generation=self.generation, **self._known)


def run_attempt(options: AttemptOptions, job: Job, supervisor: Supervisor) -> int:
    """Train until the run or this attempt ends; return the exit code of a run that has ended.

    The error that ends the attempt in any other way has its exit code from `exit_code_of`.
    """
    record = ensure_run_config(options.store, job.run_config(), job.placement)
    lease = supervisor.take_lease(
        options.store, options.run_id, options.writer, options.lease_ttl_seconds
    )
    if isinstance(lease, Head):
        return _report_ended(options.store.uri, lease)
    run = HeldRun(options, supervisor, lease, record, job.ranks)
    with run.ending():
        run.begin()
        run.finish(job.train(run))
    return EXIT_FINISHED


def _report_ended(uri: str, head: Head) -> int:
    """Print that a run has ended already; return the exit code."""
    if head.state == "finished":
        _log.info("[ok] %s is finished: weights %s", uri, head.weights_sha256)
        return EXIT_FINISHED
    _log.error("[failed] %s has failed: %s", uri, head.reason)
    return EXIT_FAILED
