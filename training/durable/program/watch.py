"""Watches a program from its start to its end: metrics, snapshots, notices, and what it leaves."""

import contextlib
import hashlib
import json
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.keys import FINAL_FILES
from contract.program import LOSSES, WORKLOAD
from training.durable.attempt.attempt import HeldRun
from training.durable.attempt.notice import Notice
from training.durable.errors import AttemptEndedError, InterruptedRunError, RunFailedError
from training.durable.program.container import ProgramOptions, files_below
from training.durable.program.elsewhere import Elsewhere
from training.durable.program.event_file import MetricRow
from training.durable.program.failure import (
    blamed_place,
    failure_reason,
    failures_in_a_row,
    hidden_failures,
    silent_end,
    why_given_up,
)
from training.durable.program.log import ProgramLog
from training.durable.program.metrics import MetricReader
from training.durable.program.process import LeftProcesses, ProgramProcess, SharedMemory
from training.durable.record.history import History
from training.durable.record.metrics import Events, Metrics
from training.durable.report.receipt import RunResult, interruption_facts
from training.durable.save.publish import CheckpointPublisher
from training.durable.save.snapshots.listing import saved_places
from training.durable.save.snapshots.mirror import Mirror
from training.durable.store.folder import write_whole
from training.durable.store.local_dataset import sha256_of
from training.durable.store.protocol import StoreError

_RUNNING_SECONDS = 5.0


class ReportedProgress:
    """The steps, metrics and snapshots of one attempt.

    `step` is the program's own, as its metrics name it; without any, the last snapshot's number.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.step = 0
        self.last: dict[str, float] = {}  # the newest value of each metric
        self.snapshot = 0  # the number of the last one that this attempt has committed
        self.has_steps = False
        # After a resume: numbers not above it; the third says that they are steps and no epochs.
        self._low = set[int]()
        self.first_step: int | None = None
        self._metrics = metrics
        self._began = self._stepped = time.monotonic()
        self._safe = self._began  # another machine would have what was done until then
        self._reported = self._began
        self._stopped = math.inf  # when the program ended

    def resume(self, step: int, snapshot: str | None) -> None:
        """Begin where the restored snapshot was taken."""
        self.step = step
        self._metrics.write("resume", stage=WORKLOAD, step=step, checkpoint=snapshot)

    def begin(self) -> None:
        """Start the clocks, as the program starts now."""
        self._began = self._stepped = self._safe = self._reported = time.monotonic()

    @property
    def unsaved_seconds(self) -> float:
        """The cost of losing the machine: the time since the last snapshot's content was written.

        It ends with the program: the seconds it took to exit count, as they may have done work.
        """
        return max(0.0, min(time.monotonic(), self._stopped) - self._safe)

    @property
    def seconds(self) -> float:
        """The time since the program's start, until its end."""
        return min(time.monotonic(), self._stopped) - self._began

    def add(self, rows: Sequence[MetricRow]) -> None:
        """Write what the program has reported."""
        by_step: dict[int | None, dict[str, float]] = {}
        for row in rows:
            by_step.setdefault(row.step, {})[row.name] = row.value
        for step, values in by_step.items():
            self.last |= {name: one for name, one in values.items() if math.isfinite(one)}
            # One that has resumed may log what is no loss by epoch, or at step 0 as Lightning does.
            self._low |= {step} if step and not self.has_steps else set()
            is_loss = step and (len(self._low) > 2 or not values.keys().isdisjoint(LOSSES))
            is_first = not self.has_steps and (is_loss or not self.step)
            if step is not None and (step > self.step or is_first):
                is_late = is_first and len(self._low) > 2
                self._step_on(min(self._low) if is_late else step, values)
            self._metrics.write("metrics", stage=WORKLOAD, step=self.step, at=step, values=values)

    def committed(self, number: int, age_seconds: float) -> None:
        """Note a safe snapshot, whose content was written `age_seconds` ago."""
        self.snapshot = number
        self._safe = max(self._safe, time.monotonic() - max(0.0, age_seconds))

    def end(self, exit_code: int, unsaved_seconds: float) -> None:
        """Record that the program has ended, and how much of its work is not saved."""
        self._write_cost("ended", unsaved_seconds, exit_code=exit_code)

    def stopped(self) -> None:
        """Stop the clock of unsaved work: the program has just ended, or must now."""
        self._stopped = time.monotonic()

    def notice(self) -> None:
        """Record that a notice came at this step."""
        self._metrics.write("notice", stage=WORKLOAD, step=self.step)

    def report(self) -> None:
        """Every few seconds, record what a loss would cost: for the receipt, if it comes."""
        now = time.monotonic()
        if now - self._reported >= _RUNNING_SECONDS:
            self._reported = now
            self._write_cost("running", round(self.unsaved_seconds, 2))

    def _write_cost(self, kind: str, unsaved_seconds: float, **more: object) -> None:
        seconds = {"seconds": round(self.seconds, 2), "unsaved_seconds": unsaved_seconds}
        more |= {"step": self.step, **seconds, "snapshot": self.snapshot}
        self._metrics.write(kind, stage=WORKLOAD, **more)

    def _step_on(self, step: int, values: dict[str, float]) -> None:
        now = time.monotonic()
        self.first_step = step if self.first_step is None else self.first_step
        loss = next((values[name] for name in LOSSES if name in values), None)
        self._metrics.write(
            "step",
            stage=WORKLOAD,
            step=step,
            seconds=round(now - self._stepped, 4),
            **({} if loss is None else {"loss": loss}),
        )
        self.step, self.has_steps, self._stepped = step, True, now


_log = logging.getLogger(__name__)

# After this long without a snapshot, warn of what a loss costs: where nothing was written, where
# something was that is never quiet, and where something was that is not saved.
_NO_SNAPSHOT_SECONDS = 180.0
_NEVER_QUIET_SECONDS = 45.0
_ELSEWHERE_SECONDS = 60.0
_POLL_SECONDS = 0.2
_LISTEN_SECONDS = 1.0
# How a program ends in a native library's destructor, and how soon after it has written its model.
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_LAST_SECONDS = 10.0
_LOG_SECONDS = 30.0  # also for the curves that the last snapshot has not waited for


class ProgramWatch:
    """Watches a program and the mirror of its checkpoints, in the main thread of the attempt.

    The watchdog watches it: each look is a report.
    """

    def __init__(self, options: ProgramOptions, run: HeldRun) -> None:
        container, mirrored = options.container, options.mirrored
        self._options = options
        self._run = run
        self._progress = ReportedProgress(run.metrics)
        self._reader = MetricReader(
            definitions=options.program.metric_definitions,
            folders=[container.output, *saved_places(mirrored)],
        )
        self._reading = threading.Lock()
        self._shared_memory = SharedMemory(run.store.uri)
        publisher = CheckpointPublisher(
            run.store,
            run.lease,
            events=run.events,
            metrics=run.metrics,
            retention=options.retention,
        )
        self._mirror = Mirror(
            publisher,
            folder=mirrored,
            work=options.root / ".mirror",
            quiet_seconds=options.program.quiet_seconds,
            note=self._note,
        )
        self.commit_file = self._mirror.commit_file
        self._warnings: list[str] = []
        self._elsewhere = Elsewhere(options)
        self._warned_of = 0  # about the missing snapshot: 1 nothing was written, 2 what was
        self._log: ProgramLog | None = None
        self._process: ProgramProcess
        self._left: LeftProcesses
        self._number = 0  # of the last snapshot
        self._restored = 0, 0  # the number of the snapshot that the program was given, and its step
        self._files: tuple[str, ...] = ()  # of it, if its failures may be their fault
        self._save_seconds = 0.0  # the longest of a snapshot so far
        self._notice: Notice | None = None
        self._ended_at = math.inf
        self._is_cut = False  # in the middle of its writing
        self._is_deaf = False  # not signalled, as it would die of that

    def restore(self) -> str:
        """Begin from the newest intact snapshot, or from the start; return its name, or ""."""
        restored, passed_over = self._mirror.restore()
        if restored is None:
            self._progress.resume(0, None)
            return ""
        name, self._number = restored.entry.name, restored.entry.step
        saved = restored.content.manifest
        # The program itself vouches for what it has committed.
        self._files = () if saved.program_says_when else tuple(file.path for file in saved.files)
        step = int(saved.note.get("step", restored.entry.step))
        self._progress.resume(step, name)
        self._restored = self._number, int(saved.note.get("step", 0))
        self._run.events.emit(
            "resumed",
            "ok",
            checkpoint=name,
            step=step,
            bytes=saved.num_bytes,
            passed_over=[{"name": name, "why": why} for name, why in passed_over],
        )
        return name

    @contextlib.contextmanager
    def log(self) -> Iterator[int]:
        """Yield the log's descriptor for the program; at the end, read what the program left."""
        # Earlier attempts have reported what is already in files.
        self._reader.skip_history()
        head, options = self._run.lease.head, self._options
        writer = f"{head.generation:04d}-{head.nonce}"
        local = options.scratch / "logs" / f"{writer}.log"
        self._log = ProgramLog(options.store, writer, local, self._reader.read_lines)
        try:
            yield self._log.output
        finally:
            notice = self._notice
            seconds = _LOG_SECONDS if notice is None else min(1.0, notice.seconds_left / 4)
            self._log.close(seconds)
            self._read_metrics(time.monotonic() + min(1.0, seconds))

    def begin(self, process: ProgramProcess) -> None:
        """Begin to watch the program, which has been started."""
        assert self._log is not None
        container, quiet = self._options.container, self._options.program.quiet_seconds
        folders = (container.checkpoints, container.model, container.output)
        self._process, self._left = process, LeftProcesses(process, folders, quiet)
        self._mirror.start(process.pid)
        self._log.start()
        self._progress.begin()
        _log.info("[program] started as process %d", process.pid)
        if (told := hidden_failures(self._options.program.command)) is not None:
            self._warn(*told)

    def until_end(self) -> None:
        """Return once the program has ended, or its machine is about to."""
        interruption = self._run.supervisor.interruption
        while not self._has_ended(_POLL_SECONDS):
            self._look()
            self._warn_without_snapshot()
            if interruption.notice is not None:
                self._answer(interruption.notice)
                break
            if interruption.take_rebalance():
                self._run.events.emit("rebalance", unsaved_seconds=self._unsaved())
                self._mirror.request("rebalance")
        self._mirror.end_looks()
        self._progress.stopped()
        self._ended_at = time.time()
        if self._notice is None and (notice := interruption.heard_late()) is not None:
            self._notice = notice
            self._progress.notice()

    def _has_ended(self, seconds: float) -> bool:
        """Wait for the end of all its processes; end those that need not be waited for."""
        process = self._process
        if process.wait(seconds) is not None:
            return True
        if self._left.are_done():
            process.close()
            if self._left.still_write:
                text = "processes that still wrote minutes after the first had ended were killed"
                self._warn("left-behind", f"{text}: have the program wait for them")
                self._is_cut = True
        elif process.left_code is not None and (tops := process.tops):
            self._mirror.follow(tops[0])
        return process.exit_code is not None

    def conclude(self) -> RunResult:
        """Save what the program left; return the result of a finished run, else raise an error."""
        exit_code, notice, run = self._process.exit_code, self._notice, self._run
        assert exit_code is not None and self._log is not None
        self._mirror.final(
            exit_code=-signal.SIGKILL if self._is_cut else exit_code,
            deadline=None if notice is None else notice.save_by,
            release=notice is not None,
        )
        if notice is None and self._reader.has_more:
            self._read_metrics(time.monotonic() + _LOG_SECONDS)
        self._count_snapshots()
        has_finished = exit_code == 0 and notice is None
        unsaved = 0.0 if has_finished else self._unsaved()
        self._progress.end(exit_code, unsaved)
        if notice is not None:
            if not self._number:
                self._warn_without_snapshot(has_ended=True)
            run.events.emit("program-ended", exit_code=exit_code, unsaved_seconds=unsaved)
            _log.info(
                "[program] %s: %.1f s since its last snapshot are lost", notice.cause, unsaved
            )
            raise InterruptedRunError(notice.cause)
        if exit_code != 0:
            return self._failed(exit_code, self._log.tail, unsaved)
        return self._result(*self._upload_final(), exit_code)

    def _failed(self, exit_code: int, tail: Sequence[str], unsaved: float) -> RunResult:
        """Raise the error of a failed attempt; return the result of one that only crashed at exit.

        It wrote its model last; so did the attempt before it, after which nothing was left to save,
        and crashed alike: a native library's destructor does that.
        """
        run, container = self._run, self._options.container
        sums, size = dict[str, str](), 0
        with contextlib.suppress(StoreError):  # its own error says more
            sums, size = self._upload_final()
        is_crash = (-exit_code if exit_code < 0 else exit_code - 128) in _CRASHES
        written = [path.stat().st_mtime for path in container.model.rglob("*") if path.is_file()]
        is_last = max(written, default=0.0) > self._ended_at - _LAST_SECONDS
        end = {"exit_code": exit_code, "snapshot": self._number, "model": sorted(sums)}
        before = Events.read(run.store, "program-failed")[-1:]
        is_again = any(one.get("is_at_end") and end.items() <= one.items() for one in before)
        if is_crash and is_last and is_again and not self._progress.snapshot:
            text = "it crashed at its exit again, its model written and nothing left to train"
            self._warn("crashed-at-exit", f"{text}: the run counts as finished")
            return self._result(sums, size, exit_code)
        reason = failure_reason(container, exit_code, tail)
        if not (self._progress.has_steps and self._progress.step > self._restored[1]):
            place = blamed_place(tail, self._files, container)
            reason += self._mirror.count_failure(place, silent_end(tail, exit_code))
        # A script may report only what it logs without a step, at step 0.
        step = (self._progress.step if self._progress.has_steps else self._restored[1]) or -1
        about = before[-1] if before else {}, self._restored[0], step, self._progress.seconds
        series = failures_in_a_row(*about, has_committed=(commits := self._progress.snapshot > 0))
        run.events.emit(
            "program-failed",
            "failed",
            message=reason + f"; what it left is below {FINAL_FILES}" * bool(sums),
            unsaved_seconds=unsaved,
            is_at_end=is_crash and is_last and commits,
            **series,
            **end,
        )
        if why := why_given_up(series):
            raise RunFailedError(f"{reason}; {why}")
        raise AttemptEndedError(reason)

    def close(self) -> None:
        """Stop mirroring; what is being sent is never committed later."""
        self._run.supervisor.last_resort.stand_down()
        self._mirror.close()
        self._shared_memory.remove()

    def _note(self) -> Mapping[str, Any]:
        """Return what is kept with a snapshot: the program's step.

        Called by the mirror's thread at a capture, whose commit waits for the metrics until then.
        """
        self._read_metrics()
        return {"step": self._progress.step} if self._progress.has_steps else {}

    def _upload_final(self) -> tuple[dict[str, str], int]:
        """Upload the artifacts; return their checksums by name below final/, and their bytes.

        The lease is renewed before each, so that no stale writer uploads one.
        """
        sums, size, left_out = dict[str, str](), 0, list[str]()
        root = self._options.root
        for prefix in ("model", "output/data"):
            for name, path in files_below(root / prefix, prefix, (root, root / prefix), left_out):
                self._run.lease.beat()
                sums[name] = sha256_of(path)
                size += path.stat().st_size
                self._run.store.put_file(f"{FINAL_FILES}{name}", path)
        if left_out:
            self._warn("left-out", f"not among the final files: {', '.join(left_out)[:1000]}")
        _log.info("[program] %d final files, %d bytes", len(sums), size)
        return sums, size

    def _result(self, sums: Mapping[str, str], size: int, exit_code: int) -> RunResult:
        run, progress = self._run, self._progress
        if self._restored[0] and not (sums or progress.snapshot or progress.has_steps):
            text = f"given snapshot {self._number}, it ended with 0, and saved and reported nothing"
            self._warn("nothing-done", f"{text}: if it was not done before, its log says why")
        if not sums and not self._number:
            self._warn_without_snapshot(has_ended=True)
            _log.warning(
                "[program] it left nothing in SM_MODEL_DIR, SM_OUTPUT_DATA_DIR or "
                "SM_CHECKPOINT_DIR; what it wrote elsewhere is lost with this machine"
            )
        digest, saved = _digest_of_model(sums), sorted(self._mirror.checksums())
        if not digest and saved:
            shown = ", ".join(saved[:3]) + f" and {len(saved) - 3} more" * (len(saved) > 3)
            _log.info(
                f"[program] it left no model in SM_MODEL_DIR; the last snapshot has {shown}: "
                f"runs download {run.store.uri} --checkpoint newest"
            )
        run.metrics.flush()
        run.lease.beat()
        # The model of an attempt that crashed at its end stays where this one has written none.
        wrote = tuple({f"{FINAL_FILES}{name.partition('/')[0]}/" for name in sums})
        others = run.store.sizes(FINAL_FILES).keys() - {FINAL_FILES + name for name in sums}
        run.store.delete(key for key in others if key.startswith(wrote))
        history = History.read(run.store)
        return RunResult(
            steps=max(history.steps["step"], default=0),
            weights_sha256=digest,
            stages={WORKLOAD: self._progress.last},
            facts={
                "program": self._options.program.command,
                "exit_code": exit_code,
                "snapshots": max((entry.step for entry in run.lease.head.checkpoints), default=0),
                **interruption_facts(history),
                "warnings": self._warnings,
                "final_files": sums,
                "checkpoint_files": {} if digest else self._mirror.checksums(),
                "final_bytes": size,
            },
        )

    def _look(self) -> None:
        """Do what is due a few times a second."""
        self._run.supervisor.watchdog.beat()
        self._run.lease.check()
        self._mirror.check()
        self._shared_memory.look()
        self._read_metrics()
        self._count_snapshots()
        self._warn_if_started_over()
        self._progress.report()

    def _read_metrics(self, until: float | None = None) -> None:
        with self._reading:
            self._progress.add(self._reader.poll(until))

    def _count_snapshots(self) -> None:
        last = self._mirror.last
        if last is not None and last.number != self._number:
            self._number = last.number
            if not self._progress.snapshot:
                _log.info(
                    f"[program] the first snapshot of this attempt, {last.snapshot}, is committed "
                    f"after {self._progress.seconds:.1f} s: {last.num_files} files ({last.reason})"
                )
            self._save_seconds = max(self._save_seconds, last.seconds)
            self._progress.committed(last.number, time.time() - last.written_at)

    def _unsaved(self) -> float:
        return round(self._progress.unsaved_seconds, 3)

    def _answer(self, notice: Notice) -> None:
        """Signal the program, wait for it, and end it when its time is up."""
        self._notice = notice
        with contextlib.suppress(AttemptEndedError):  # such as a full disk: the signal remains
            _write_notice(self._options.notice_file, notice)
        self._progress.notice()
        until = self._tell(notice)
        self._mirror.request("emergency")
        self._wait_until(until)

    def _tell(self, notice: Notice) -> float:
        """Signal the program if it would not only die of it; return when its time is up.

        One that is not signalled goes on, mirrored, until just before the last snapshot must begin.
        """
        number, pids, why = self._signal_to_send()
        now = time.monotonic()
        until = max(now, notice.last_save_at(self._save_seconds))
        if number is None and notice.cause == "shutdown":
            # Nothing takes the machine away: one more quiet moment, then the end.
            until = min(until, now + self._options.program.quiet_seconds + self._save_seconds)
        if number is not None:
            with self._mirror.signalling():
                self._process.signal(number, pids)
        elif self._is_deaf:
            return until
        self._is_deaf, name = number is None, "none" if number is None else number.name
        left, own = notice.seconds_left, until - time.monotonic()
        _log.info(
            f"[notice] {left:.1f} s: {f'{name} sent' if number else f'no signal, as {why}'}; the "
            f"program has {own:.1f} s, its last snapshot takes about {self._save_seconds:.1f} s, "
            "the rest is reserve"
        )
        self._run.events.emit(
            "notice",
            cause=notice.cause,
            seconds_left=round(left, 3),
            program_seconds=round(own, 3),
            snapshot_seconds=round(self._save_seconds, 3),
            signal=name,
        )
        return until

    def _signal_to_send(self) -> tuple[signal.Signals | None, Sequence[int], str]:
        """Return the signal of a notice and who gets it, or None and why."""
        name = self._options.program.notice_signal
        if name == "none":
            return None, (), "the program wants none"
        pids = self._process.takers(number := signal.Signals[name])
        if pids == []:
            return None, (), f"the program does not handle {name}"
        return number, pids or (), ""

    def _wait_until(self, until: float) -> None:
        """Wait for the program's end, but not once another machine could take over."""
        extra_time = self._run.supervisor.extra_time
        extra_time.watch_candidates()
        next_look = 0.0
        while (left := until - time.monotonic()) > 0 and not extra_time.is_lease_wanted:
            if self._has_ended(min(_POLL_SECONDS, left)):
                return
            self._look()
            if self._is_deaf and self._notice and time.monotonic() >= next_look:
                # It may install its handler late.
                next_look, again = time.monotonic() + _LISTEN_SECONDS, self._tell(self._notice)
                until = until if self._is_deaf else again
        self._is_cut = True  # also in a process that its first one, which ended well, has left
        if not extra_time.is_lease_wanted:
            _log.info("[notice] out of time; stopping the program")

    def _warn_without_snapshot(self, *, has_ended: bool = False) -> None:
        """Warn, once for each reason, that a loss would now cost everything since the start."""
        options, seconds, is_known = self._options, self._progress.seconds, 2
        if self._warned_of == is_known or self._progress.snapshot:
            return
        folder, quiet = options.container.checkpoints, options.program.quiet_seconds
        if (obstacle := self._mirror.obstacle(max(_NEVER_QUIET_SECONDS, 3 * quiet))) is not None:
            what, outlook = obstacle
            why = f"in {folder} {what}, and a snapshot needs {quiet:g} s without a change"
            remedy = f"; {outlook}. Call commit() after each save, or write that file elsewhere"
        elif self._mirror.obstacle(sys.float_info.min) is not None:
            return  # it waits for its moment
        elif (found := self._found_elsewhere(has_ended)) is not None:
            what, how = found
            why, remedy = f"{what} but none in {folder}", f"; if it saves there, {how}"
        elif self._warned_of == 0 and (has_ended or seconds >= _NO_SNAPSHOT_SECONDS):
            why, remedy, is_known = f"the program has saved nothing in {folder}", "", 1
        else:
            return
        usd = options.usd_per_hour
        cost = "" if usd is None else f", {seconds * usd / 3600:.2f} dollars so far"
        loss = f"losing the machine costs all of it{cost}{remedy}"
        text = f"no snapshot after {seconds:.0f} s: {why}, so {loss}"
        self._warned_of = is_known
        self._warn("no-snapshot", text, seconds=round(seconds, 1))

    def _found_elsewhere(self, has_ended: bool) -> tuple[str, str] | None:
        is_seen = has_ended or self._progress.seconds >= _ELSEWHERE_SECONDS
        return self._elsewhere.found(is_last=has_ended) if is_seen and not self._number else None

    def _warn_if_started_over(self) -> None:
        """Warn once that the program seems not to have read the snapshot it was given."""
        at, (number, step) = self._progress.first_step, self._restored
        if at is None or 2 * at >= step:
            return
        self._restored = 0, 0
        text = (
            f"the program was given snapshot {number}, of step {step}, but begins at step {at}; "
            "the furthest snapshot is kept until another passes it: if the run has started over, "
            f"python -m training reopen --from-checkpoint {number} --run-uri {self._run.store.uri} "
            "goes back to it"
        )
        self._warn("started-over", text, step=at)

    def _warn(self, event: str, text: str, **facts: float) -> None:
        self._warnings.append(text)
        self._run.events.emit(event, "info", message=text, **facts)
        _log.warning("[program] %s", text)


def _write_notice(path: Path, notice: Notice) -> None:
    """Write the program's notice file, atomically."""
    left = notice.seconds_left
    record = {"deadline": round(time.time() + left, 3), "seconds": round(left, 3)}
    write_whole(path, json.dumps(record).encode())


def _digest_of_model(sums: Mapping[str, str]) -> str | None:
    """One checksum of all names and contents in model/; None if it is empty."""
    model = {name: one for name, one in sums.items() if name.startswith("model/")}
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest() if model else None
