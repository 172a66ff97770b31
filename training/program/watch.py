"""Watches a program from its start to its end: metrics, snapshots, notices, and what came of it."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from contract.notice import save_reserve
from training.attempt.notice import InterruptedRunError, Notice
from training.attempt.supervisor import Supervisor
from training.errors import EXIT_FINISHED, ProgramFailedError
from training.program.final import failure_reason, upload_final
from training.program.log import ProgramLog
from training.program.metrics import MetricReader
from training.program.notice import NoticePlan, write_notice
from training.program.options import ProgramOptions
from training.program.process import ProgramProcess
from training.program.progress import Progress
from training.program.receipt import write_program_receipt
from training.record.events import Events
from training.record.head import is_waited_for
from training.record.lease import Lease
from training.record.metrics import Metrics
from training.record.run_config import RunConfig
from training.save.mirror import Mirror, Restored

_log = logging.getLogger(__name__)

# Without a snapshot for so long, the run is warned of what a loss costs: where nothing was written,
# and where something was that is never quiet.
NO_SNAPSHOT_SECONDS = 600.0
NEVER_QUIET_SECONDS = 45.0
_POLL_SECONDS = 0.2
_CANDIDATE_SECONDS = 2.0
_LOG_SECONDS = 30.0


class ProgramWatch:
    """One program of one attempt; the main thread's share of it."""

    def __init__(
        self, options: ProgramOptions, lease: Lease, events: Events, metrics: Metrics
    ) -> None:
        container = options.container
        self._options = options
        self._lease = lease
        self._events = events
        self._progress = Progress(metrics)
        self._reader = MetricReader(
            definitions=options.program.metric_definitions,
            folders=[container.output, container.checkpoints],
        )
        self._reading = threading.Lock()
        self._warnings: list[str] = []
        self._log: ProgramLog | None = None
        self._process: ProgramProcess
        self._mirror: Mirror
        self._supervisor: Supervisor
        self._number = 0  # of the last snapshot
        self._save_seconds = 0.0  # the longest of a snapshot so far
        self._notice: Notice | None = None

    def note(self) -> Mapping[str, Any]:
        """What is kept with a snapshot: the program's step.

        Called by the mirror's thread at a capture, whose commit waits for the metrics until then.
        """
        self._read_metrics()
        return {"step": self._progress.step} if self._progress.has_steps else {}

    def resume(self, restored: Restored | None) -> None:
        """Begin from a restored snapshot, or anew."""
        if restored is None:
            self._progress.resume(0, None)
            return
        self._number = restored.entry.step
        step = int(restored.note.get("step", restored.entry.step))
        self._progress.resume(step, restored.entry.name)
        self._events.emit(
            "resumed",
            "ok",
            checkpoint=restored.entry.name,
            step=step,
            bytes=restored.bytes,
            passed_over=[{"name": name, "why": why} for name, why in restored.passed_over],
        )

    @contextlib.contextmanager
    def log(self) -> Iterator[int]:
        """The log's descriptor for the program; at the end, what the program left is read."""
        # Earlier attempts have reported what stands in files already.
        self._reader.skip_history()
        head, options = self._lease.head, self._options
        writer = f"{head.generation:04d}-{head.nonce}"
        local = options.scratch / "logs" / f"{writer}.log"
        self._log = ProgramLog(options.store, writer, local, self._reader.feed)
        try:
            yield self._log.output
        finally:
            notice = self._notice
            self._log.close(_LOG_SECONDS if notice is None else min(1.0, notice.seconds_left / 4))
            self._read_metrics(is_last=True)

    def begin(self, process: ProgramProcess, mirror: Mirror, supervisor: Supervisor) -> None:
        """The program has been started."""
        self._process, self._mirror, self._supervisor = process, mirror, supervisor
        assert self._log is not None
        self._log.start()
        self._progress.begin()
        _log.info("[program] started as process %d", process.pid)

    def until_end(self) -> None:
        """Return once the program has ended, or its machine is about to."""
        self._until_end()
        self._progress.stopped()

    def _until_end(self) -> None:
        interruption = self._supervisor.interruption
        while self._process.wait(_POLL_SECONDS) is None:
            self._look()
            self._warn_without_snapshot()
            if interruption.notice is not None:
                self._answer(interruption.notice)
                return
            if interruption.take_rebalance():
                self._events.emit("rebalance", unsaved_seconds=self._unsaved())
                self._mirror.request("rebalance")

    def conclude(self, record: RunConfig, began: float) -> int:
        """Save what the program left; the exit code of a finished run, else an error."""
        exit_code = self._process.exit_code
        assert exit_code is not None and self._log is not None
        notice, deadline = self._notice, None
        if notice is not None:
            deadline = notice.deadline - save_reserve(notice.deadline - notice.received)
        self._mirror.final(
            exit_code=exit_code,
            deadline=deadline,
            release=notice is not None,
        )
        self._count_snapshots()
        has_finished = exit_code == 0 and notice is None
        unsaved = 0.0 if has_finished else self._unsaved()
        self._progress.end(exit_code, unsaved)
        if notice is not None:
            self._events.emit("program-ended", exit_code=exit_code, unsaved_seconds=unsaved)
            _log.info(
                "[program] %s: %.1f s since its last snapshot are lost", notice.cause, unsaved
            )
            raise InterruptedRunError(notice.cause)
        if exit_code != 0:
            self._mirror.count_failure()
            tail = self._log.tail
            reason = failure_reason(self._options.container, exit_code, tail[-1] if tail else "")
            self._events.emit(
                "program-failed",
                "failed",
                message=reason,
                exit_code=exit_code,
                unsaved_seconds=unsaved,
            )
            raise ProgramFailedError(reason)
        return self._finish(record, began)

    def _finish(self, record: RunConfig, began: float) -> int:
        store, container = self._options.store, self._options.container
        final = upload_final(container, store, self._lease)
        self._progress.flush()
        receipt = write_program_receipt(
            store,
            self._lease,
            record,
            final=final,
            metrics=self._progress.last,
            warnings=self._warnings,
            began=began,
        )
        self._events.emit("finished", "ok", step=receipt["steps"], weights_sha256=final.digest)
        self._lease.finish(final.digest)
        _log.info("[ok] finished: %d final files, %d bytes", len(final.sha256), final.bytes)
        return EXIT_FINISHED

    def _look(self) -> None:
        """What is done a few times a second."""
        self._supervisor.watchdog.beat()
        self._lease.check()
        self._mirror.check()
        self._read_metrics()
        self._count_snapshots()
        self._progress.tell()

    def _read_metrics(self, *, is_last: bool = False) -> None:
        with self._reading:
            self._progress.add(self._reader.poll(is_last=is_last))

    def _count_snapshots(self) -> None:
        last = self._mirror.last
        if last is not None and last.number != self._number:
            self._number = last.number
            self._save_seconds = max(self._save_seconds, last.seconds)
            self._progress.committed(time.time() - last.written_at)

    def _unsaved(self) -> float:
        return round(self._progress.unsaved_seconds, 3)

    def _answer(self, notice: Notice) -> None:
        """Tell the program, wait for it, and end it when its time is over."""
        self._notice = notice
        plan = NoticePlan.of(
            notice,
            self._process,
            signal_name=self._options.program.notice_signal,
            save_seconds=self._save_seconds,
            quiet_seconds=self._options.program.quiet_seconds,
        )
        write_notice(self._options.notice_file, notice)
        self._progress.notice(is_signalled=plan.signal_number is not None)
        if plan.signal_number is not None:
            self._process.signal(plan.signal_number)
        plan.log()
        self._events.emit("notice", cause=notice.cause, **plan.to_event())
        self._mirror.request("emergency")
        next_candidate = time.monotonic()
        while (left := plan.program_until - time.monotonic()) > 0:
            if self._process.wait(min(_POLL_SECONDS, left)) is not None:
                return
            self._look()
            if time.monotonic() >= next_candidate:
                if is_waited_for(self._options.store, self._lease.head.generation):
                    _log.info("[notice] another machine is waiting for the lease")
                    return
                next_candidate = time.monotonic() + _CANDIDATE_SECONDS
        _log.info("[notice] out of time; stopping the program")

    def _warn_without_snapshot(self) -> None:
        """Once: that a loss would now cost everything since the start."""
        options, seconds = self._options, self._progress.seconds
        if self._warnings or self._progress.num_snapshots:
            return
        folder, quiet = options.container.checkpoints, options.program.quiet_seconds
        if (obstacle := self._mirror.obstacle(max(NEVER_QUIET_SECONDS, 3 * quiet))) is not None:
            why = f"in {folder} {obstacle}, and a snapshot needs {quiet:g} s without a change"
            remedy = "; write that file elsewhere, or call commit() after each save"
        elif seconds >= NO_SNAPSHOT_SECONDS:
            why, remedy = f"the program has written nothing to {folder}", ""
        else:
            return
        usd = options.usd_per_hour
        cost = "" if usd is None else f", {seconds * usd / 3600:.2f} dollars so far"
        text = (
            f"no snapshot after {seconds:.0f} s: {why}, so losing the machine costs all of "
            f"it{cost}{remedy}"
        )
        self._warnings.append(text)
        self._events.emit("no-snapshot", "info", message=text, seconds=round(seconds, 1))
        _log.warning("[program] %s", text)
