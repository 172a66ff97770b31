"""A run in its store, as commands open it: its record, its head, its checkpoints by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import UserError
from contract.keys import CONFIG, FINAL_FILES, HEAD
from contract.program import WORKLOAD as PROGRAM
from training.durable.record.head import CheckpointEntry, Head
from training.durable.record.run_config import RunConfig
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store


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

    @classmethod
    def at(cls, uri: str) -> "OpenRun":
        """Open the run at `uri`; UserError if there is none."""
        store = open_store(uri)
        head, record = Head.read(store), RunConfig.read(store)
        if head is None or record is None:
            lacks = HEAD if head is None else CONFIG
            raise UserError(f"no run found at {store.uri} (no {lacks}); check the URI")
        return cls(store=store, record=record, head=head)

    @classmethod
    def of_workload(cls, uri: str) -> "OpenRun":
        """Open the run of a workload at `uri`; UserError if it is something else."""
        run = cls.at(uri)
        if run.is_of_program:
            raise UserError(
                f"{run.store.uri} is the run of a program, whose weights only the program can "
                f"read; what it left in model/ is in {run.store.uri}/{FINAL_FILES}model/"
            )
        return run

    def find_checkpoint(self, text: str) -> CheckpointEntry:
        """Find the checkpoint named by `newest`, `best`, a step, or the start of its name."""
        entries = self.head.checkpoints
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
            raise UserError(f"the run {self.store.uri} {many} {text!r}; use one of: {self.choices}")
        return found[0]

    @property
    def choices(self) -> str:
        """List what `find_checkpoint` accepts for this run."""
        entries = self.head.checkpoints
        best = ["best"] if any(entry.is_best for entry in entries) else []
        steps = dict.fromkeys(str(entry.step) for entry in entries)
        return ", ".join(["newest", *best, *steps]) if steps else "none yet"
