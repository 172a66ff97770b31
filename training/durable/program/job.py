"""One attempt of a program: restored, started, mirrored and concluded."""

import contextlib
import gzip
import hashlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from contract.errors import Exit, UserError
from contract.file_names import walked
from contract.keys import DATASET_FILES, MANIFEST
from contract.program import PLACEMENT, WORKLOAD
from contract.source import copy_source, source_sha256
from training.durable.attempt.attempt import HeldRun, opened_dataset, run_attempt
from training.durable.attempt.notice import Notice
from training.durable.attempt.ranks import meet
from training.durable.attempt.supervisor import Supervisor, Watchdog
from training.durable.errors import AttemptEndedError, InterruptedRunError
from training.durable.program.container import ContainerHost, ProgramOptions, build_command, claimed
from training.durable.program.process import ProgramProcess
from training.durable.program.watch import ProgramWatch
from training.durable.record.run import OpenRun, RunConfig
from training.durable.report.receipt import RunResult
from training.durable.save.snapshots.mirror import restore_as
from training.durable.store.folder import open_store
from training.durable.store.local_dataset import ARRIVING
from training.durable.store.protocol import Store

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_T = TypeVar("_T")


def run_program(options: ProgramOptions, supervisor: Supervisor) -> int:
    """Run the program until the run or this attempt ends; return the exit code of an ended run."""
    with (
        _opened_input(options, supervisor.watchdog) as dataset,
        claimed(options.root, options.store.uri),
    ):
        job = _ProgramJob(options, dataset)
        if options.hosts is not None and options.hosts.number:
            return job.follow(supervisor)
        return run_attempt(options, job, supervisor)


# A program's dataset: its fingerprint, and a function that waits for a sync and returns the folder
# whose files become the program's channels, or None without a dataset.
_InputData: TypeAlias = tuple[str, Callable[[], Path | None]]


class _ProgramJob:
    """A program in its container; refuses what no machine could start."""

    placement = PLACEMENT
    ranks: int | None = None

    def __init__(self, options: ProgramOptions, dataset: _InputData) -> None:
        self._options = options
        self._fingerprint, self._dataset_folder = dataset
        self._source_sha256 = source_sha256(options.source)
        copy_source(options.source, options.container.code)
        self._host = ContainerHost.here(options.instance_type, options.hosts)
        channels = options.program.channels if options.dataset_uri else ()
        self._command = build_command(options, self._host, channels, os.environ)
        self._origin = _origin(options)
        self._has_ended = False  # by itself: others' programs have, too, or are about to

    def run_config(self) -> RunConfig:
        """Return config.json's content if this is the run's first attempt."""
        return self._options.run_config(
            workload=WORKLOAD,
            recipe=WORKLOAD,
            overrides={},
            config=self._options.identity(self._source_sha256),
            dataset=self._fingerprint,
            numerics_key={},
            origin=self._origin,
        )

    def train(self, run: HeldRun) -> RunResult:
        """Restore the newest snapshot and run the program to its end."""
        options, command = self._options, self._command
        with contextlib.closing(ProgramWatch(options, run)) as watch:
            snapshot = _beating(run, watch.restore)
            if self._origin and not snapshot:
                _beating(run, self._begin_with_origin)
                run.events.emit("begun-from", "ok", **self._origin)
            run.lease.sweep()
            _beating(run, self._prepare)
            options.notice_file.unlink(missing_ok=True)
            variables = {**command.variables, "TRAINING_COMMIT_FILE": str(watch.commit_file)}
            with self._meeting(run.supervisor, run.lease.check, snapshot):
                with watch.log() as output, self._process(variables, output) as process:
                    watch.begin(process)
                    watch.until_end()
                    self._has_ended = run.supervisor.interruption.notice is None
                # Uploads may take minutes; those that end before a notice's deadline count.
                return _beating(run, watch.conclude, until_notice=False)

    def follow(self, supervisor: Supervisor) -> int:
        """On hosts after the first, run the program on the same snapshot, and keep nothing."""
        options = self._options
        with self._meeting(supervisor) as snapshot:
            supervisor.follow()
            restore_as(options.store, snapshot, options.mirrored)
            self._origin = _origin(options)  # as the first host has recorded it by now
            if self._origin and not snapshot:
                self._begin_with_origin()
            self._prepare()
            options.notice_file.unlink(missing_ok=True)
            with self._process(self._command.variables, sys.stdout.fileno()) as process:
                while process.wait(_POLL_SECONDS) is None and process.left_code is None:
                    if supervisor.interruption.notice is not None:
                        break
                # Where all hosts agree to stop, a program ends with 0 before it has finished.
                if (notice := supervisor.interruption.notice) is not None:
                    supervisor.last_resort.stand_down()
                    _end_in_time(process, options.program.notice_signal, notice)
                    raise InterruptedRunError(notice.cause)
            if process.exit_code:
                raise AttemptEndedError(f"the program ended with exit code {process.exit_code}")
        return Exit.FINISHED

    def _process(
        self, variables: Mapping[str, str], output: int
    ) -> contextlib.closing[ProgramProcess]:
        words, folder = self._command.words, self._command.folder
        view = self._options.container.view(self._dataset_folder())
        process = ProgramProcess(
            words, folder=folder, variables=variables, output=output, view=view
        )
        return contextlib.closing(process)

    @contextlib.contextmanager
    def _meeting(
        self, supervisor: Supervisor, check: Callable[[], None] = lambda: None, snapshot: str = ""
    ) -> Iterator[str]:
        """Meet all hosts on the first one's snapshot; the loss of one is a notice to all."""
        options = self._options
        if options.hosts is None:
            yield snapshot
            return

        def waiting() -> None:
            supervisor.wait_for_others()
            check()

        def report(why: str, grace_seconds: float = 0.0) -> None:
            _log.warning("[program] %s, so the program ends here, too", why)
            supervisor.interruption.record("shutdown")

        given = options.identity(self._source_sha256)
        facts = {
            **{name: value for name, value in given.items() if name not in PLACEMENT},
            "dataset": self._fingerprint,
            "run": options.store.uri,
            "origin": self._origin and self._origin["uri"],
        }
        meeting, has_finished = meet(options.hosts, facts, waiting, snapshot), False

        def leave() -> None:
            # At once: the others' programs may end with this one, and would seem to have finished.
            supervisor.interruption.wait(threading.TIMEOUT_MAX)
            if not self._has_ended:
                meeting.close()

        threading.Thread(target=leave, name="leave", daemon=True).start()
        try:
            meeting.watch(report)
            yield meeting.message
            has_finished = True
        finally:
            meeting.close(has_finished=has_finished)

    def _begin_with_origin(self) -> None:
        assert self._origin is not None
        name = self._origin["checkpoint"]
        restore_as(open_store(self._origin["uri"]), name, self._options.mirrored)
        _log.info("[program] begins with snapshot %s of %s", name, self._origin["uri"])

    def _prepare(self) -> None:
        options = self._options
        options.container.prepare(options.program, self._host, self._dataset_folder())


def _origin(options: ProgramOptions) -> Mapping[str, Any] | None:
    """Return the run and the snapshot that this run begins with, as its config.json has them."""
    if not (asked := options.program.init_from):
        return None
    uri = asked if "://" in asked else str(Path(asked).absolute())
    record = RunConfig.read(options.store)
    if record is not None and record.origin and record.origin["uri"] == uri:
        return record.origin
    old = OpenRun.at(uri)
    if not old.is_of_program:
        raise UserError(f"{uri} is the run of a workload; a program begins with a program's run")
    newest = old.find_checkpoint("newest")
    return {"uri": uri, "checkpoint": newest.name, "step": newest.step}


def _end_in_time(process: ProgramProcess, signal_name: str, notice: Notice) -> None:
    """Signal a program whose files are not kept, if it listens, and allow it the notice's time.

    One that does not listen ends with the first host's, which may need it until its last snapshot.
    """
    number = None if signal_name == "none" else signal.Signals[signal_name]
    if number is not None and (pids := process.takers(number)) != []:
        process.signal(number, pids or ())
    while process.wait(_POLL_SECONDS) is None and time.monotonic() < notice.save_by:
        pass


def _beating(run: HeldRun, act: Callable[[], _T], *, until_notice: bool = True) -> _T:
    """Do long work in a thread, and keep reporting to the watchdog; a lost lease ends it."""
    result: Future[_T] = Future()

    def work() -> None:
        try:
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name="prepare", daemon=True).start()
    while not futures.wait([result], _POLL_SECONDS).done:
        run.supervisor.watchdog.beat()
        run.lease.check()
        notice = run.supervisor.interruption.notice
        if until_notice and notice is not None:
            raise InterruptedRunError(notice.cause)
    return result.result()


@contextlib.contextmanager
def _opened_input(options: ProgramOptions, watchdog: Watchdog) -> Iterator[_InputData]:
    """Open the dataset; a local folder needs no manifest."""
    uri = options.dataset_uri
    if uri is None:
        yield "none", lambda: None
        return
    folder = Path(uri)
    if folder.is_dir() and not any((folder / name).exists() for name in (MANIFEST, ARRIVING)):
        yield _fingerprint(folder, options.store), lambda: folder
        return
    with opened_dataset(uri, options.scratch, watchdog) as opened:
        yield opened.fingerprint, lambda: opened.folder


def _fingerprint(folder: Path, store: Store) -> str:
    """Return the fingerprint of a folder without a manifest: of the names and sizes first there.

    What has come since, such as a program's index beside its data, makes no difference.
    """
    lines = set[str]()
    for below, _, names in walked(folder):
        # A dangling link is not a file, as for an upload; an index is the program's own.
        data = (name for name in names if not fnmatch(name, "*.cache"))
        for path in filter(Path.is_file, (Path(below, name) for name in data)):
            lines.add(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n")
    if not lines:
        raise UserError(
            f"the dataset folder {folder} is empty; name one with files, or leave it out"
        )
    if RunConfig.read(store) is None:
        store.put(DATASET_FILES, gzip.compress(os.fsencode("".join(sorted(lines)))))
    elif first := store.get(DATASET_FILES):
        known = set(os.fsdecode(gzip.decompress(first.data)).splitlines(keepends=True))
        if missing := sorted(known - lines):
            raise UserError(
                f"the dataset folder {folder} lacks {missing[0].strip()!r} (name and bytes), with "
                f"which the run {store.uri} began; restore it, or use another run URI"
            )
        lines = known
    return "sizes-" + hashlib.sha256(os.fsencode("".join(sorted(lines)))).hexdigest()
