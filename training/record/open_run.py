"""An existing run, opened for reading, and its checkpoints by the names that people give."""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.keys import HEAD
from contract.program import WORKLOAD as PROGRAM
from training.errors import UserError
from training.record.checkpoint_entry import CheckpointEntry
from training.record.head import Head, read_head
from training.record.run_config import RunConfig, read_run_config
from training.store.open import open_store
from training.store.protocol import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """A run as it is now."""

    store: Store
    record: RunConfig
    head: Head

    @property
    def is_of_program(self) -> bool:
        """Whether its checkpoints are snapshots of a program's folder."""
        return self.record.workload == PROGRAM


def open_run(uri: str) -> OpenRun:
    """Open the run at `uri`; UserError if there is none."""
    store = open_store(uri)
    head, record = read_head(store), read_run_config(store)
    if head is None or record is None:
        raise UserError(f"no run found at {store.uri} (no {HEAD}); check the URI")
    return OpenRun(store=store, record=record, head=head)


def find_checkpoint(run: OpenRun, text: str) -> CheckpointEntry:
    """Find the checkpoint named by `newest`, `best`, a step, or the start of its name."""
    entries = run.head.checkpoints
    if text == "newest":
        found: Sequence[CheckpointEntry] = entries[-1:]
    elif text == "best":
        # A stage's later best is better: it was compared with the earlier one.
        found = [entry for entry in entries if entry.is_best][-1:]
    elif text.isdecimal() and len(text) < 8:
        # A stage's last step may have two: the newer one includes the evaluation.
        found = [entry for entry in entries if entry.step == int(text)][-1:]
    else:
        found = [entry for entry in entries if entry.name.startswith(text)]
    if len(found) != 1:
        many = f"has {len(found)} checkpoints" if found else "has no checkpoint"
        raise UserError(f"the run {run.store.uri} {many} {text!r}; give one of: {choices(run)}")
    return found[0]


def choices(run: OpenRun) -> str:
    """What `find_checkpoint` takes for this run."""
    entries = run.head.checkpoints
    best = ["best"] if any(entry.is_best for entry in entries) else []
    steps = dict.fromkeys(str(entry.step) for entry in entries)
    return ", ".join(["newest", *best, *steps]) if steps else "it has none yet"
