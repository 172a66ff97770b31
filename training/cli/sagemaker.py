"""`python -m training sagemaker`: train a workload as the container of a SageMaker training job.

Checkpoints go to the run's own S3 prefix: SageMaker's copy of /opt/ml/checkpoints writes without
conditions, in no order, and cannot hold a lease. Imports no torch.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from contract.keys import CONFIG, FINAL, MANIFEST, RECEIPT, REPORT
from training.cli.outputs import checked_folder
from training.cli.sagemaker_job import SageMakerJob, read_job
from training.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STORE,
    UserError,
)
from training.record.head import read_head
from training.store.open import open_store
from training.store.protocol import StoreError

# As of training.service: three failures in six hours are not a coincidence.
_MAX_FAILURES, _WITHIN_SECONDS = 3, 6 * 3600.0
_RESTART_SECONDS = 3.0
# Not for ever: a process that outlives the trainer holds its standard error open.
_LAST_WORDS_SECONDS = 5.0
# How far SageMaker's SIGKILL may be late.
_LATE_SECONDS = 30.0
_TRAINING = (sys.executable, "-m", "training")
_EXIT_TERMINATED = 128 + signal.SIGTERM
# FailureReason has 1,024 characters.
_MAX_REASON = 1024


def add_sagemaker(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sagemaker`."""
    parser.description = (
        "Run as the entry point of a SageMaker training job: read workload, recipe, run URI and "
        "overrides from the job's hyperparameters, train or resume, and leave the weights in "
        "/opt/ml/model. SIGTERM is a notice of 120 s: the run is saved, and the container waits "
        "for its end, so that the job counts neither as completed nor as failed."
    )
    parser.add_argument(
        "verb", nargs="?", choices=["train"], help="what SageMaker adds to the image's entry point"
    )
    parser.add_argument(
        "--ml-root", type=Path, default=Path("/opt/ml"), help="default: %(default)s"
    )
    parser.set_defaults(act=_act)


def _act(arguments: argparse.Namespace) -> int:
    root: Path = arguments.ml_root
    try:
        job = read_job(root, os.environ)
        checked_folder(job.model_folder)
        return _train(job)
    except (UserError, StoreError) as error:
        # The only place where SageMaker shows a reason.
        _write_failure(root / "output" / "failure", str(error))
        raise


def _train(job: SageMakerJob) -> int:
    trainer, code = _import(job)
    if code == EXIT_FINISHED:
        trainer = Trainer([*_TRAINING, *job.arguments])
        code = trainer.run()
    if code == EXIT_FINISHED:
        return _leave_model(job)
    if trainer.told_at is not None:
        how = "saved" if code == EXIT_INTERRUPTED else f"not saved: {trainer.reason(code)}"
        return _await_the_end(job, trainer.told_at, how)
    _write_failure(job.failure_file, _reason_of_run(job) or trainer.reason(code))
    return code if code > 0 else EXIT_FAILED


def _import(job: SageMakerJob) -> tuple["Trainer", int]:
    """Make the dataset of files of one's own, which are checked before anything is trained."""
    if job.importing is None or (job.dataset / MANIFEST).is_file():
        return Trainer(_TRAINING), EXIT_FINISHED
    # A container that was killed meanwhile may have left a part of it.
    shutil.rmtree(job.dataset, ignore_errors=True)
    importer = Trainer([*_TRAINING, *job.importing], max_failures=1)
    return importer, importer.run()


def _reason_of_run(job: SageMakerJob) -> str | None:
    """Why the run has failed for good: a second attempt says so in its log only."""
    with contextlib.suppress(UserError, StoreError):
        head = read_head(open_store(job.run_uri))
        return head.reason if head is not None and head.state == "failed" else None
    return None


class Trainer:
    """A process of `python -m training`: started again after a crash, told to end when we are."""

    def __init__(
        self,
        command: Sequence[str],
        sleep: Callable[[float], None] = time.sleep,
        max_failures: int = _MAX_FAILURES,
    ) -> None:
        self.told_at: float | None = None  # when SIGTERM came, on the monotonic clock
        self._command = command
        self._sleep = sleep
        self._max_failures = max_failures
        self._process: subprocess.Popen[bytes] | None = None
        self._said: deque[str] = deque(maxlen=20)

    def run(self) -> int:
        """Train to an end; the exit code of the last attempt, 75 where SIGTERM came before it."""
        before = signal.signal(signal.SIGTERM, self._tell)
        try:
            code = EXIT_INTERRUPTED
            failed_at: deque[float] = deque(maxlen=self._max_failures)
            while self.told_at is None:
                code = self._attempt()
                failed_at.append(time.monotonic())
                is_crash = code in (EXIT_FAILED, EXIT_STORE) or code < 0
                are_many = len(failed_at) == self._max_failures
                if not is_crash or (are_many and failed_at[-1] - failed_at[0] < _WITHIN_SECONDS):
                    break
                if self.told_at is None:
                    print(f"[sagemaker] {self.reason(code)}; trying again", flush=True)
                    self._sleep(_RESTART_SECONDS)
            return code
        finally:
            signal.signal(signal.SIGTERM, before)

    def reason(self, code: int) -> str:
        """Why it failed: what it said last, its own error first."""
        errors = [line for line in self._said if line.startswith("error: ")]
        said = (errors or list(self._said) or [""])[-1].removeprefix("error: ")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{said} ({how})" if said else f"the trainer ended with {how}"

    def _attempt(self) -> int:
        self._said.clear()
        process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._process = process
        if self.told_at is not None:
            process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        listener = threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)
        listener.start()
        code = process.wait()
        listener.join(_LAST_WORDS_SECONDS)
        return code

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr:
            while line := stderr.readline(65536):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
                if text := line.decode(errors="replace").strip():
                    self._said.append(text)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if self.told_at is None:
            self.told_at = time.monotonic()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)


def _leave_model(job: SageMakerJob) -> int:
    """Copy the deliverables to the model folder, which SageMaker uploads as model.tar.gz."""
    store = open_store(job.run_uri)
    for key in (FINAL, CONFIG, RECEIPT, REPORT):
        try:
            store.get_file(key, job.model_folder / Path(key).name)
        except FileNotFoundError:
            if key == FINAL:
                raise UserError(
                    f"{store.uri} is finished, but its {FINAL} is gone; train again under another "
                    "run URI"
                ) from None
            # A machine lost right after the run had finished leaves it without a report.
            print(f"[sagemaker] {store.uri} has no {key}", flush=True)
    print(f"[ok] {job.model_folder} has {Path(FINAL).name}", flush=True)
    return EXIT_FINISHED


def _await_the_end(job: SageMakerJob, told_at: float, how: str) -> int:
    """Wait for SageMaker to kill the container; say so where it does not.

    It reads exit code 0 as a completed job and any other as a failed one, and this is neither.
    """
    print(f"[sagemaker] {how}; this container waits for its end", flush=True)
    while (left := told_at + job.notice_seconds + _LATE_SECONDS - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
    _write_failure(
        job.failure_file,
        f"interrupted, {how}: submit the same job again, and {job.run_uri} resumes from its last "
        "commit",
    )
    return _EXIT_TERMINATED


def _write_failure(path: Path, reason: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(reason[:_MAX_REASON], encoding="utf-8")
    except OSError as error:
        print(f"[sagemaker] {path} could not be written: {error}", file=sys.stderr)
