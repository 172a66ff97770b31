"""One attempt of a program: take the lease, restore, start it, mirror it, and conclude.

It ends as a workload's attempt does, with the same exit codes: finished, failed, interrupted and
saved, lease lost, or refused because of a user's mistake.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from contract.program import PLACEMENT
from contract.source import source_sha256
from training.attempt.notice import InterruptedRunError
from training.attempt.supervisor import Supervisor
from training.errors import EXIT_FAILED, EXIT_FINISHED
from training.program.container import Machine
from training.program.input_data import InputData, open_input
from training.program.options import ProgramOptions, build_command
from training.program.process import ProgramProcess
from training.program.root import claimed, copy_source
from training.program.watch import ProgramWatch
from training.record.events import Events
from training.record.head import Head
from training.record.lease import Lease, LeaseLostError
from training.record.metrics import Metrics
from training.record.run_config import RunConfig, ensure_run_config
from training.report.receipt import conclude
from training.save.mirror import Mirror
from training.store.protocol import StoreError

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
T = TypeVar("T")


def run_program(options: ProgramOptions, supervisor: Supervisor) -> int:
    """Run the program until the run or this attempt ends; the exit code of a run that has ended."""
    began = time.monotonic()
    source = source_sha256(options.source)
    dataset = open_input(options.dataset_uri, options.scratch, supervisor.watchdog.beat)
    with claimed(options.root, options.store.uri):
        record = ensure_run_config(
            options.store, options.run_config(source, dataset.fingerprint), PLACEMENT
        )
        # Before the lease is taken: no machine could start what cannot be started here.
        copy_source(options.source, options.container.code)
        machine = Machine.here(options.instance_type)
        channels = options.program.channels if options.dataset_uri else ()
        files = {"TRAINING_NOTICE_FILE": options.notice_file, "TRAINING_COMMIT_FILE": Path()}
        build_command(options, machine, channels, files, os.environ)
        lease = supervisor.take_lease(
            options.store, options.run_id, options.writer, options.lease_ttl_seconds
        )
        if isinstance(lease, Head):
            return _report_ended(options.store.uri, lease)
        supervisor.last_resort.hold(lease)
        with Attempt(options, supervisor, lease, record, machine, began).ending() as attempt:
            return attempt.run(dataset, channels)


def _report_ended(uri: str, head: Head) -> int:
    """Print that a run has ended already; return the exit code."""
    if head.state == "finished":
        _log.info("[ok] %s is finished", uri)
        return EXIT_FINISHED
    _log.error("[failed] %s has failed: %s", uri, head.reason)
    return EXIT_FAILED


class Attempt:
    """What one attempt holds: the lease, the records it writes, the mirror."""

    def __init__(
        self,
        options: ProgramOptions,
        supervisor: Supervisor,
        lease: Lease,
        record: RunConfig,
        machine: Machine,
        began: float,
    ) -> None:
        head = lease.head
        self._options = options
        self._supervisor = supervisor
        self._lease = lease
        self._record = record
        self._machine = machine
        self._began = began
        self._events = Events(options.store, options.writer)
        self._metrics = Metrics(options.store, head.generation, head.nonce, options.metrics_file)
        self._watch = ProgramWatch(options, lease, self._events, self._metrics)
        self._mirror = Mirror(
            store=options.store,
            lease=lease,
            folder=options.container.checkpoints,
            work=options.root / ".mirror",
            events=self._events,
            metrics=self._metrics,
            retention=options.retention,
            quiet_seconds=options.program.quiet_seconds,
            note=self._watch.note,
        )

    @contextlib.contextmanager
    def ending(self) -> "Iterator[Attempt]":
        """Release the lease and flush what was recorded, however the attempt ends."""
        try:
            yield self
        finally:
            self._supervisor.last_resort.stand_down()
            self._mirror.close()
            # What ends the attempt is more telling than a release that did not work either.
            with contextlib.suppress(LeaseLostError, StoreError):
                self._lease.release()
            with contextlib.suppress(StoreError):
                self._metrics.flush()
            if self._lease.head.state == "released":
                self._events.emit("released", "ok", generation=self._lease.head.generation)
            self._lease.close()
            self._metrics.close()
            conclude(self._options.store, self._record, self._lease.head)

    def run(self, dataset: InputData, channels: tuple[str, ...]) -> int:
        """Restore, run the program, conclude; the exit code, or the error that has one."""
        options, container = self._options, self._options.container
        price = {} if options.usd_per_hour is None else {"usd_per_hour": options.usd_per_hour}
        self._events.emit("take-over", "ok", generation=self._lease.head.generation, **price)
        self._lease.start_heartbeat()
        self._lease.sweep()
        self._watch.resume(self._beating(self._mirror.restore))

        def prepare() -> None:
            container.prepare(options.program, self._machine, dataset.folder)

        self._beating(prepare)
        options.notice_file.unlink(missing_ok=True)
        files = {
            "TRAINING_NOTICE_FILE": options.notice_file,
            "TRAINING_COMMIT_FILE": self._mirror.commit_file,
        }
        command = build_command(options, self._machine, channels, files, os.environ)
        with (
            self._watch.log() as output,
            contextlib.closing(
                ProgramProcess(
                    command.words, folder=command.folder, variables=command.variables, output=output
                )
            ) as process,
        ):
            self._mirror.start(process.pid)
            self._watch.begin(process, self._mirror, self._supervisor)
            self._watch.until_end()
        # Uploads may take minutes; those that are over before a notice's deadline count.
        return self._beating(
            lambda: self._watch.conclude(self._record, self._began), until_notice=False
        )

    def _beating(self, act: Callable[[], T], *, until_notice: bool = True) -> T:
        """Do work that may take long in a thread: the watchdog is told, a lost lease ends it."""
        results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put((act(), None))
            except BaseException as error:
                results.put((None, error))

        threading.Thread(target=work, name="prepare", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                result, error = results.get(timeout=_POLL_SECONDS)
                if error is not None:
                    raise error
                return result  # type: ignore[return-value]
            self._supervisor.watchdog.beat()
            self._lease.check()
            notice = self._supervisor.interruption.notice
            if until_notice and notice is not None:
                raise InterruptedRunError(notice.cause)
