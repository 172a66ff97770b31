"""The dataset of an attempt: a folder, or what a sync from S3 fills while the attempt begins."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from training.attempt.watchdog import Watchdog
from training.errors import EXIT_MACHINE, EXIT_USER, MachineError, UserError
from training.report.progress import FileProgressBar
from training.store.dataset import read_manifest
from training.store.local_dataset import LocalDataset, is_syncing, open_dataset
from training.store.open import open_store
from training.store.protocol import StoreError

_POLL_SECONDS = 0.1
# A machine's boot tries a sync that fails again within half of this (userdata/run_step.py).
_PATIENCE_SECONDS = 60.0
# What takes no longer than this needs no progress bar.
_QUIET_SECONDS = 3.0


@contextlib.contextmanager
def opened_dataset(uri: str, scratch: Path, watchdog: Watchdog) -> Iterator[LocalDataset]:
    """Open the dataset, each file verified or waited for.

    From S3 it is synced by another process, and opens as soon as that has begun: what needs a file
    waits for it. A process, because a sync's checksums and connections would slow training down.
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

            dataset = open_dataset(
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
    read_manifest(open_store(uri))  # what is missing or forbidden is said here
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
            kinds = {EXIT_USER: UserError, EXIT_MACHINE: MachineError}
            raise kinds.get(sync.returncode, StoreError)(
                f"the dataset {uri} could not be synced; see the lines above"
            )
        yield
    finally:
        sync.terminate()
        sync.wait()
