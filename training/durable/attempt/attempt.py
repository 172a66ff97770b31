"""One attempt of a run, by the process that holds its lease: from the lease to the receipt.

It ends in one of five ways, each with its exit code: finished, failed, interrupted and saved, lease
lost, or refused because of a user's mistake. It trains a `_Job`: the stages of a workload
(training/engine) or a program (durable/program), over a dataset in a folder, which a sync from S3
may still be filling. Imports no torch.
"""

import contextlib
import logging
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from contract.errors import Exit, UserError
from contract.goodput import PLANNED, USEFUL
from training.durable.attempt.supervisor import Supervisor, Watchdog
from training.durable.errors import MachineError, RunFailedError
from training.durable.record.head import KEEP_NEWEST, Head, Retention
from training.durable.record.lease import Lease, LeaseLostError, with_way_back
from training.durable.record.metrics import Events, Metrics
from training.durable.record.run import RunConfig, ensure_run_config, now_utc
from training.durable.report.progress import FileProgressBar
from training.durable.report.receipt import RunResult, conclude, write_receipt
from training.durable.store.dataset import StoredDataset
from training.durable.store.folder import open_store
from training.durable.store.local_dataset import LocalDataset, is_syncing
from training.durable.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOptions:
    """The command line's options for one attempt, whatever it trains."""

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

    @property
    def planned_life_seconds(self) -> float:
        """What the plan has learned of the time between interruptions; 0 if nothing."""
        hours = (self.prediction or {}).get("life_hours")
        return 3600 * hours if isinstance(hours, float) else 0.0

    @property
    def planned_evaluations(self) -> float:
        """Seconds of evaluations for each second of steps, by the plan; 0 without one."""
        causes = "evaluation", "data_wait", USEFUL
        found = ((self.prediction or {}).get(PLANNED + cause) for cause in causes)
        evaluating, *steps = (each if isinstance(each, float) else 0.0 for each in found)
        return evaluating / (sum(steps) or math.inf)

    def run_config(self, **what: Any) -> RunConfig:
        """Return config.json's content if this is the first attempt; `what` is the job's part."""
        return RunConfig(
            run_id=self.run_id,
            bundle_uri=self.bundle_uri,
            writer=self.writer,
            created_at=now_utc(),
            prediction=self.prediction,
            **what,
        )


class _Job(Protocol):
    """The work of an attempt: stages or a program."""

    placement: frozenset[str]  # the fields of its config that may differ between attempts
    ranks: int | None  # that train it in this attempt; None: the job decides

    def run_config(self) -> RunConfig:
        """Return config.json's content if this is the run's first attempt."""

    def train(self, run: "HeldRun") -> RunResult:
        """Restore the last commit, then sweep, and train to the end; any other end is raised.

        Not earlier: a machine that cannot read what was committed must delete nothing.
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

    @property
    def of_rank_0(self) -> dict[str, Any]:
        """The fields of an `AttemptContext` that rank 0 alone has."""
        return {"own_lease": self.lease, "metrics": self.metrics, "events": self.events}

    def begin(self) -> None:
        """Report the take-over, and keep renewing the lease."""
        self._report_take_over()
        self.lease.start_heartbeat()

    def begin_generation(self, skipped_steps: tuple[int, ...]) -> None:
        """Go on as the next attempt would, in the same process and without these steps."""
        self.metrics.flush()
        self.lease.begin_generation(skipped_steps)
        self.metrics.begin_generation(self.generation, self.lease.head.nonce)
        self._report_take_over()

    def finish(self, result: RunResult) -> None:
        """Write the receipt and mark the run finished."""
        self.metrics.flush()
        write_receipt(self.store, self.lease, self.record, result, self.supervisor.began)
        weights = result.weights_sha256
        self.events.emit("finished", "ok", step=result.steps, weights_sha256=weights)
        self.lease.finish(weights)
        _log.info("[ok] finished: %s steps, weights %s", result.steps or "no", weights or "none")

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Release the lease, flush the metrics and write the report, however the attempt ends."""
        try:
            yield
        except RunFailedError as error:
            self.supervisor.last_resort.stand_down()
            self.metrics.flush()
            reason = with_way_back(str(error), self.store.uri)
            self.events.emit("failed", "failed", message=reason)
            self.lease.fail(reason)
            _log.error("[failed] the run has failed: %s", reason)
            raise
        finally:
            self.supervisor.last_resort.stand_down()
            # The error that ends the attempt reveals more than a release that fails too.
            with contextlib.suppress(LeaseLostError, StoreError):
                self.lease.release()
            with contextlib.suppress(StoreError):
                self.metrics.flush()
            if self.lease.head.state == "released":
                self.events.emit("released", "ok", generation=self.generation)
            self.lease.close()
            self.metrics.close()
            conclude(self.store, self.record, self.lease.head)

    def _report_take_over(self) -> None:
        """Write the event of a new generation, with price and ranks for report and receipt."""
        self.events.emit("take-over", "ok", generation=self.generation, **self._known)


def run_attempt(options: AttemptOptions, job: _Job, supervisor: Supervisor) -> int:
    """Train until the run or this attempt ends; return the exit code of a run that has ended.

    The error that ends the attempt in any other way gets its exit code from `exit_code_of`.
    """
    record = ensure_run_config(options.store, job.run_config(), job.placement)
    lease = supervisor.take_lease(
        options.store, options.run_id, options.writer, options.lease_ttl_seconds
    )
    if isinstance(lease, Head):
        head, uri = lease, options.store.uri
        if head.state == "finished":
            _log.info("[ok] %s is finished: weights %s", uri, head.weights_sha256 or "none")
            return Exit.FINISHED
        _log.error("[failed] %s has failed: %s", uri, head.reason)
        return Exit.FAILED
    run = HeldRun(options, supervisor, lease, record, job.ranks)
    with run.ending():
        run.begin()
        run.finish(job.train(run))
    return Exit.FINISHED


_POLL_SECONDS = 0.1
# A machine's boot retries a failed sync within half of this (userdata/run_step.py).
_PATIENCE_SECONDS = 60.0
# What takes no longer than this needs no progress bar.
_QUIET_SECONDS = 3.0


@contextlib.contextmanager
def opened_dataset(uri: str, scratch: Path, watchdog: Watchdog) -> Iterator[LocalDataset]:
    """Open the dataset, with each file verified or waited for.

    From S3 another process syncs it, because checksums and connections would slow training down. It
    opens as soon as that has begun: whatever needs a file waits for it.
    """
    with contextlib.ExitStack() as stack:
        folder, patience_seconds = Path(uri), _PATIENCE_SECONDS
        if uri.startswith("s3://"):
            folder, patience_seconds = scratch / "dataset", 0.0
            stack.enter_context(_synced(uri, folder, watchdog))
        began = time.monotonic()
        with FileProgressBar("verifying the dataset") as show:

            def report(done: int, total: int, size: int) -> None:
                watchdog.beat()
                if time.monotonic() - began > _QUIET_SECONDS:
                    show(done, total, size)

            dataset = LocalDataset.open(
                folder,
                progress=report,
                waiting=watchdog.beat,
                patience_seconds=patience_seconds,
            )
        # A loader's worker may wait for a file as long as the sync takes.
        watchdog.excuse = lambda: dataset.is_arriving
        yield dataset


@contextlib.contextmanager
def _synced(uri: str, folder: Path, watchdog: Watchdog) -> Iterator[None]:
    """Start the sync into `folder`; stop it when the attempt ends."""
    StoredDataset(open_store(uri)).require()  # reports here what is missing or forbidden
    command = [sys.executable, "-m", "training", "data", "sync"]
    # A session of its own: Ctrl-C is for the trainer, which saves and then stops the sync.
    sync = subprocess.Popen(
        [*command, "--dataset-uri", uri, "--out", str(folder)], start_new_session=True
    )
    try:
        while sync.poll() is None and not is_syncing(folder):
            watchdog.beat()
            time.sleep(_POLL_SECONDS)
        if sync.returncode:
            # After anything else a restart may help.
            kinds: dict[int, type[Exception]] = {Exit.USER: UserError, Exit.MACHINE: MachineError}
            raise kinds.get(sync.returncode, StoreError)(
                f"the dataset {uri} could not be synced; see the lines above"
            )
        yield
    finally:
        sync.terminate()
        sync.wait()
