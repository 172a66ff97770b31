"""Decides when a folder is captured: when the program says so, or when nothing changed for a while.

Once a program has touched the commit file, no other moment counts, because only the program knows
which of its files belong together. If neither moment ever comes, the program is stopped for a
capture, which then holds what a crash would have left.
"""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.durable.save.snapshots.capture import Moment
from training.durable.save.snapshots.listing import (
    ChangedError,
    Listing,
    Root,
    SnapshotError,
    leaves,
    list_folder,
)
from training.durable.save.snapshots.processes import held_open, living_below
from training.durable.save.snapshots.quiet import (
    GrowingFiles,
    QuietTime,
    Replacing,
    SaveHabit,
    plain,
)
from training.durable.save.snapshots.snapshot import Reason

_log = logging.getLogger(__name__)

# How often the commit file is looked for: a program may wait for it.
_POLL_SECONDS = 0.025
# Looking at a big folder takes at most this share of one core.
_LOOKING_SHARE = 0.02
# The quiet time after a notice: the program may be gone before the usual one is over.
_HASTY_SECONDS = 1.0
# In quiet times: the pause after which a save is over, if earlier ones ended so.
_PAUSE_SHARE = 0.2
# How much of the time that usually passes between two saves shows that none is under way, and
# after how many quiet times without a snapshot any pause does.
_GAP_SHARE, _ANY_PAUSE_TIMES = 0.6, 3
# The share of the time in which a program may stand still for copies that are longer than this.
_COPYING_SHARE, _COPY_SECONDS = 0.1, 1.0
# How long a program may go without such a moment before it is stopped at any: in quiet times, but
# at most so many seconds, and fewer after a notice.
_RESTLESS_TIMES, _RESTLESS_SECONDS, _HASTY_PAUSE_SECONDS = 12, 120.0, 7.5
# A file that only grows is sent again as a whole, on average no faster than this.
_GROWTH_BYTES_PER_SECOND = 1e6
# In bytes: of smaller files another one may be as large by chance, and so they are counted.
_SMALL = 4096
# How often another one was saved that has taken the place of one that is gone.
_SAVES = 2
# How often a file is then rewritten that is no part of one long save.
_REWRITES = 3
# How often it is stopped at most, until nothing is open for writing.
_STOPS = 16
# A shell's exit code for a program that SIGKILL ended.
_KILLED = 128 + signal.SIGKILL


class Watcher:
    """Watches the folder, in a thread that calls `capture` at the right moments.

    The main thread watches it: `Mirror.check` raises the `error` that has ended it.

    `capture` returns what it has captured, or raises, for instance if the folder has changed since
    it was found quiet; `refused` gets the reason why nothing can be captured.
    """

    def __init__(
        self,
        folder: Root,
        commit_file: Path,
        quiet_seconds: float,
        capture: Callable[[Reason, Moment], Listing],
        refused: Callable[[SnapshotError], None],
    ) -> None:
        self.says_when = False
        self.is_hasty = False
        self.captured: Listing | None = None
        self.standstill_error: SnapshotError | None = None  # why stopping the program failed
        self.error: BaseException | None = None
        self._folder = folder
        self._commit_file = commit_file
        self._quiet_seconds = quiet_seconds
        self._capture_now = capture
        self._refused = refused
        self._quiet, self.rest = QuietTime(), QuietTime()  # the folder; what is saved in place
        self._habit, self._replacing = SaveHabit(), Replacing(folder)
        self.growing = GrowingFiles(folder, quiet_seconds, _PAUSE_SHARE * quiet_seconds)
        self._is_tentative = False  # the last capture
        self._was_saving = False  # when it was signalled, and that save has not ended since
        self._told: tuple[Listing, str | None]  # the folder, and an open file, at that moment
        self._told_at = 0.0
        # A file that was open for writing in a quiet time, and when that time began.
        self._held: tuple[str | None, float] = None, 0.0
        self._patience = 1.0  # doubled after each failed stop
        # The last capture, and its thread's time: that is not a look's.
        self._copied_at, self._copy_seconds, self._copying = -math.inf, 0.0, 0.0
        self._captured_since = 0.0  # since when what it holds in place had been so
        self.was_emptied = False  # of what it was restored with
        self._warned: set[str] = set()
        self._uncaptured_since: float | None = None  # the first look at something new
        self._grown_at = -math.inf  # the last capture of growth
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, program: int | None = None) -> None:
        """Watch from now on, as long as that process lives; `last_moment` handles its end."""
        self.follow(program)
        self.growing.saved_ns = time.time_ns()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def follow(self, program: int | None) -> None:
        """Watch what this process writes, until it has died."""
        self._quiet.program = self.rest.program = program

    def stop(self, seconds: float | None = None) -> None:
        """Stop watching; wait up to `seconds` for a capture under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def end_looks(self) -> None:
        """Look no more; what the program left counts as quiet no longer than until now."""
        self._quiet.ended = self.rest.ended = time.monotonic()
        self._stop.set()

    def note_signal(self) -> None:
        """Note, before the program is signalled, whether it is in a save, which that may tear.

        A program that exits takes seconds, its files closed: a second's pause proves nothing then.
        """
        listing = self._list()
        is_new = self.captured is None or self.captured.difference(listing) is not None
        listing = self._replacing.in_place(listing)
        if not listing.files or not (is_new or self._is_tentative):
            return
        seconds, held = self.rest.seconds_until_now(listing), held_open(listing)
        is_open = held is not None and not self._stays_open(held)
        self._was_saving = is_open or seconds < self._sure_seconds
        self._told, self._told_at = (listing, held), time.monotonic()

    def last_moment(self, exit_code: int, *, after_notice: bool) -> Moment:
        """Return when the folder of an ended program may be captured; SnapshotError if never.

        If the program says when, its last request counts, however it ended. Otherwise what it wrote
        last counts if it ended well by itself; after a notice it may have been in a save.
        """
        with suppress(FileNotFoundError):
            asked = self._moment(asked_ns=self._commit_file.stat().st_ctime_ns)
            self.says_when = True
            return asked
        if self.says_when:
            raise SnapshotError("what the program did after its last commit does not count")
        if exit_code == 0 and not after_notice:
            return Moment()
        listing = self._list()
        if listing.files and listing.is_empty:
            raise SnapshotError("it holds only TensorBoard's curves, with which no program resumes")
        if self._grown(listing):
            return self._moment(is_tentative=self._is_tentative)
        if self._is_emptied(listing):
            raise SnapshotError("the program had emptied its folder, and not saved again")
        if self._habit.is_part(listing):
            raise SnapshotError("the program ended in the middle of a save")
        if after_notice and 0 <= exit_code != _KILLED:
            if self._was_saving and not self._has_replaced(listing):
                raise SnapshotError("it was signalled in the middle of a save")
            return self._moment(is_tentative=True)
        seconds, held = self._quiet.seconds_until_now(listing), self._quiet.held_open
        if seconds >= self._wanted_seconds and held is None:
            return self._moment(quiet=self._quiet.listing)
        # A save that was over is newer than the last snapshot, even if it may be one of two parts.
        in_place = self._replacing.in_place(listing)
        seconds = self.rest.seconds_until_now(in_place)
        held = held and self.rest.held_open
        if not in_place.files or (seconds >= self._sure_seconds and held is None):
            return self._moment(is_tentative=True)
        if seconds >= self._sure_seconds:
            raise SnapshotError(f"{held} was open for writing when the program died")
        raise SnapshotError(f"the program died {seconds:.1f} s after the last change")

    def _has_replaced(self, listing: Listing) -> bool:
        """Whether all that it was saving when it was signalled has been replaced as a whole."""
        told, held = self._told
        since_ns = told.written_ns - int(self._sure_seconds * 1e9)
        files = told.files.items()
        saving = [(p, f) for p, f in files if f.mtime_ns >= since_ns or repr(p) == held]
        return all(p in listing.files and f.file != listing.files[p].file for p, f in saving)

    def is_captured(self) -> bool:
        """Whether the folder is unchanged since the last capture."""
        try:
            listing = self._list()
        except SnapshotError:
            return False
        return self.captured is not None and self.captured.difference(listing) is None

    @property
    def uncaptured_seconds(self) -> float:
        """For how long there has been something to capture but no moment to do so."""
        since = self._uncaptured_since
        return 0.0 if since is None else time.monotonic() - since

    def obstacle(self, seconds: float) -> tuple[str, str] | None:
        """Return what has kept the folder from capture for so long, and what will be done."""
        if self.uncaptured_seconds < seconds:
            return None
        listing = self._quiet.listing
        what = f"{listing.newest!r} keeps changing" if listing else "it keeps changing"
        if held := self.rest.found_open:
            what = f"{held} stays open for writing"
        if (error := self.standstill_error) is not None:
            return what, f"none can be taken with the program stopped either: {error}"
        after = f"after {self._restless_seconds:g} s"
        return what, f"{after} the program is stopped for a moment to take one"

    @property
    def _wanted_seconds(self) -> float:
        is_hasty = self.is_hasty and not self._was_saving
        return min(self._quiet_seconds, _HASTY_SECONDS) if is_hasty else self._quiet_seconds

    @property
    def _pause_seconds(self) -> float:
        return min(_PAUSE_SHARE * self._quiet_seconds, self._wanted_seconds)

    @property
    def _sure_seconds(self) -> float:
        """The pause that shows that no save is under way, if the program's habit is not known.

        On a busy machine a program may stall for longer than the share of a short quiet time.
        """
        return max(self._pause_seconds, min(self._quiet_seconds, _HASTY_SECONDS))

    @property
    def _restless_seconds(self) -> float:
        """How long the program may go without a quiet moment before it is stopped for one."""
        quiet = self._quiet_seconds
        return max(quiet, min(_RESTLESS_TIMES * quiet, _RESTLESS_SECONDS))

    def _is_between_saves(self, seconds: float) -> bool:
        """Whether what is written in place has rested for longer than in the middle of a save.

        That is known from the times between earlier saves. After a while any pause will do.
        """
        uncaptured = self.uncaptured_seconds / self._patience
        gap, is_new = self.rest.usual_gap, self.rest.since > self._captured_since
        if gap is not None and is_new and seconds >= _GAP_SHARE * gap:
            return True
        # Where nothing has been written in place since the last capture, no such save is expected.
        late = self._quiet_seconds * (_ANY_PAUSE_TIMES if gap is not None and is_new else 1)
        if self.is_hasty:
            late = min(_GAP_SHARE * self._quiet_seconds, _HASTY_PAUSE_SECONDS)
        return uncaptured >= late and seconds >= self._sure_seconds

    def _run(self) -> None:
        next_look = 0.0
        try:
            while not self._stop.wait(_POLL_SECONDS):
                if self._commit_file.exists():
                    self._commit_asked()
                elif time.monotonic() >= next_look:
                    next_look = self._look()
        except BaseException as error:  # the attempt's thread must see it
            self.error = error

    def _commit_asked(self) -> None:
        """Capture what the program asked for, and remove the file that it waits for."""
        self.says_when = True
        self.growing.logs = None  # nobody looks any more how they grow
        try:
            asked = self._commit_file.stat()
            self.captured = self._capture("commit", self._moment(asked_ns=asked.st_ctime_ns))
        except (ChangedError, FileNotFoundError) as error:
            if isinstance(error, ChangedError):
                self._refused(error)  # and try again
            return
        except SnapshotError as error:
            self._refused(error)
        # If it was touched again during the capture, that asks for another one.
        if _is_untouched(self._commit_file, asked):
            self._commit_file.unlink(missing_ok=True)

    def _look(self) -> float:
        """Capture the folder if its moment has come; return when to look again."""
        began, self._copying, wanted = time.thread_time(), 0.0, self._wanted_seconds
        if self.says_when or not self._quiet_seconds:
            return time.monotonic() + _HASTY_SECONDS
        try:
            before, listing = self._quiet.listing, self._list()
            self._report_odd(listing)
            self.growing.look(listing)
            listing = replace(listing, logs=self.growing.logs)
            if before is None:
                self._habit.begin(listing)
            else:
                self._replacing.look(before, listing)
            is_changed = self.captured is None or self.captured.difference(listing) is not None
            alive = living_below(os.getpid())
            seconds = self._quiet.look(listing, alive)
            self.rest.look(self._replacing.in_place(listing), alive)
            if grown := self._grown(listing):
                self._capture_growth(listing, grown)
            is_emptied = self._is_emptied(listing)
            self.was_emptied |= is_emptied and not self._captured_since
            if listing.is_empty or is_emptied or not (is_changed or self._is_tentative):
                self._uncaptured_since = None
            else:
                self._uncaptured_since = self._uncaptured_since or time.monotonic()
                is_part = seconds < self._quiet_seconds and self._habit.is_part(listing)
                is_sure = seconds >= self._quiet_seconds or self._is_end(listing, seconds)
                is_quiet = is_sure or (seconds >= wanted and not is_part)
                # The rest of a save may follow, and then a better moment.
                if (not is_part or self._is_overdue) and (is_changed or is_sure or not is_quiet):
                    self._capture_if_due(listing, is_quiet, is_changed=is_changed, is_sure=is_sure)
        except ChangedError:
            pass  # not quiet after all
        except SnapshotError as error:
            self._refused(error)
        looked = (time.thread_time() - began - self._copying) / _LOOKING_SHARE
        return time.monotonic() + max(min(self._pause_seconds / 4, _HASTY_SECONDS), looked)

    def _capture_if_due(
        self, listing: Listing, is_quiet: bool, *, is_changed: bool, is_sure: bool
    ) -> None:
        """Capture what has stood still, or what never does; in haste not for as long as usual."""
        if is_quiet and self._quiet.is_closed():
            reason: Reason = "notice" if self.is_hasty else "quiet"
            moment = self._moment(quiet=listing, is_tentative=not is_sure)
            self._captured(self._capture(reason, moment), is_tentative=not is_sure)
            return
        in_place, seconds = self.rest.listing, time.monotonic() - self.rest.since
        # This costs more than a look. In haste it is always done: a kill may follow.
        is_rest = self._is_between_saves(seconds)
        is_closed = (is_rest or self._was_saving or self.is_hasty) and self.rest.is_closed()
        found = self.rest.found_open
        if seconds >= self._quiet_seconds and found != self._held[0]:
            self._held = found, self.rest.since
        is_closed = is_closed or self._stays_open(found)
        is_over = seconds >= self._quiet_seconds or (is_rest and self._has_saved_since_told)
        self._was_saving &= not (is_closed and is_over)
        is_pause = is_rest and is_closed and self._may_copy
        is_late = self._is_overdue or self._is_rewriting(in_place)
        if is_changed and (is_pause or is_late) and not self._was_saving:
            try:
                listing = self._capture_stopped(in_place if is_pause else None)
                self._captured(listing, is_tentative=True)
                self.standstill_error, self._patience = None, 1.0
            except ChangedError:
                raise
            except SnapshotError as error:
                self.standstill_error, self._patience = error, 2 * self._patience
                raise

    @property
    def _has_saved_since_told(self) -> bool:
        """Whether it trains on after its signal: it has written again, a usual gap later."""
        gap = self.rest.usual_gap
        return gap is not None and self.rest.since - self._told_at >= gap

    def _is_rewriting(self, in_place: Listing | None) -> bool:
        """Whether it is late, and each file that has changed was rewritten again and again.

        Then it is whole whenever it is closed; a file of a long save is written only once.
        """
        since = max(self._copied_at, self._uncaptured_since or 0.0)
        if in_place is None or time.monotonic() - since < self._patience * self._quiet_seconds:
            return False
        before = self.captured.files if self.captured else {}
        changed = [path for path, file in in_place.files.items() if before.get(path) != file]
        rewrites = [self._replacing.rewrites[path] for path in changed]
        return min(rewrites, default=0) >= _REWRITES

    @property
    def _may_copy(self) -> bool:
        """Whether the copies for snapshots have not held up the program for too long."""
        waited = time.monotonic() - self._copied_at
        is_short = self._copy_seconds <= _COPY_SECONDS
        return self.is_hasty or is_short or waited * _COPYING_SHARE >= self._copy_seconds

    def _capture(self, reason: Reason, moment: Moment) -> Listing:
        began, used = time.monotonic(), time.thread_time()
        try:
            return self._capture_now(reason, moment)
        finally:
            self._copied_at = time.monotonic()
            self._copy_seconds = self._copied_at - began
            self._copying += time.thread_time() - used

    def _captured(self, listing: Listing, *, is_tentative: bool) -> None:
        self.captured, self._is_tentative, self._uncaptured_since = listing, is_tentative, None
        self._captured_since = self.rest.since
        self._replacing.rewrites.clear()

    def _grown(self, listing: Listing) -> list[str]:
        """Return the logs that are all that has changed since the last capture, if that counts."""
        if self.captured is None or not self.growing.are_state(listing):
            return []
        return self.captured.grown(listing)

    def _capture_growth(self, listing: Listing, grown: list[str]) -> None:
        """Capture logs as a crash would leave them: the program is stopped if there are several."""
        size = 0 if self.is_hasty else sum(listing.files[path].bytes for path in grown)
        wanted = max(self._wanted_seconds, size / _GROWTH_BYTES_PER_SECOND)
        if (now := time.monotonic()) - self._grown_at < wanted:
            return
        self._grown_at = now
        can_stop = self._quiet.program in living_below(os.getpid())
        about = {"is_tentative": self._is_tentative, "is_standstill": can_stop and len(grown) > 1}
        self.captured = self._capture("appended", self._moment(quiet=listing, **about))

    def _capture_stopped(self, pause: Listing | None) -> Listing:
        """Capture in a pause; if there is none, between two writes if that can be hit."""
        in_place = self._replacing.in_place
        moment = self._moment(is_tentative=True, is_standstill=True, quiet=pause, in_place=in_place)
        for _ in range(0 if pause else _STOPS):
            with suppress(ChangedError):
                closed = replace(moment, is_closed=True, has_died=self.rest.has_died)
                return self._capture("crash-consistent", closed)
        if not pause and not self._is_overdue:
            raise ChangedError("it is open for writing at each stop")
        return self._capture("crash-consistent", moment)

    def _stays_open(self, path: str | None) -> bool:
        """Whether it was open in a quiet time before the last change, unlike files of a save."""
        held, since = self._held
        return path is not None and path == held and since < self.rest.since

    def _is_emptied(self, listing: Listing) -> bool:
        """Whether the largest file of the last capture is gone, and no other is in its place.

        A program that was ended then would find less than it had; one that saves twice without it
        no longer needs it.
        """
        before = self.captured.files if self.captured is not None else {}
        largest = max(before, key=lambda path: before[path].bytes, default=None)
        names = {*map(plain, self._replacing.in_place(listing).files)}
        if largest is None or plain(largest) in map(plain, listing.files):
            return False
        if max((self.growing.saves[name] for name in names), default=0) >= _SAVES:
            return False
        size, sizes = before[largest].bytes, [file.bytes for file in listing.files.values()]
        return len(sizes) < len(before) if size < _SMALL else max(sizes, default=0) < size / 2

    @property
    def _is_overdue(self) -> bool:
        """Whether any moment must do."""
        return self.uncaptured_seconds >= self._patience * self._restless_seconds

    def _is_end(self, listing: Listing, seconds: float) -> bool:
        """Whether this pause is the end of a save, as far as the program's habit is known."""
        is_pause = seconds >= self._pause_seconds and self._quiet.is_closed()
        return is_pause and self._habit.is_end(listing) and not self._was_saving

    def _list(self) -> Listing:
        return list_folder(self._folder, self.growing.logs)

    def _moment(self, **about: Any) -> Moment:
        return Moment(logs=self.growing.logs, **about)

    def _report_odd(self, listing: Listing) -> None:
        """Report once what is not saved."""
        odd = {path: f"is {kind} and is not saved" for path, kind in listing.skipped.items()}
        for path, target in listing.links.items():
            if leaves(self._folder, path, target):
                what = f"points out of the folder, to {target!r}"
                odd[path] = f"{what}: the link is saved, but not its target"
        for path in [path for path in odd if path not in self._warned]:
            _log.warning(f"[snapshot] {path!r} {odd[path]}")
        self._warned.update(odd)


def _is_untouched(path: Path, before: os.stat_result) -> bool:
    with suppress(FileNotFoundError):
        now = path.stat()
        return (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    return False
