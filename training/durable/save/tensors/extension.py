"""A new run that goes on from a finished one, as finished is final: its receipt was read.

Its head is created with copies of the old one's last checkpoints, and a normal resume does the
rest. From there the learning rate follows the schedule of the longer training.
"""

import json
import logging
import tempfile
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.keys import CHECKPOINTS, artifact_prefix, checkpoint_prefix
from training.durable.record.head import CheckpointEntry, Head, new_nonce
from training.durable.record.run import OpenRun
from training.durable.save.tensors.state import STATE
from training.durable.store.protocol import PreconditionFailedError, Store
from training.durable.store.transfer import put_text

_log = logging.getLogger(__name__)


class Extension:
    """The run of a workload that another one extends."""

    def __init__(self, run: OpenRun) -> None:
        self.run = run

    @property
    def end(self) -> CheckpointEntry:
        """The end of its last stage; UserError if it has not finished."""
        if self.run.head.state != "finished":
            raise UserError(
                f"the run {self.run.store.uri} is {self.run.head.state}; only a finished run can "
                "be extended"
            )
        return next(e for e in reversed(self.run.head.checkpoints) if e.kind == "stage-end")

    def begin(self, store: Store, run_id: str, writer: str) -> None:
        """Create the head of the new run at `store`; no-op if it has one from the same end."""
        run, end = self.run, self.end
        entries = []
        with tempfile.TemporaryDirectory(prefix="extend-") as folder:
            for entry in run.head.checkpoints:
                prefix = checkpoint_prefix(entry.name)
                if entry == end:
                    # Never their state: another machine may have begun this run and written its.
                    _copy(run.store, store, prefix, Path(folder), without=prefix + STATE)
                    entries.append(self._reopened(store))
                elif entry.kind == "stage-end" and entry.stage != end.stage:
                    _copy(run.store, store, prefix, Path(folder))
                    entries.append(entry)
            for key in self.state["position"]["artifacts"].values():
                _copy(run.store, store, artifact_prefix(key), Path(folder))
        head = Head(
            run_id=run_id,
            generation=0,
            writer=writer,
            nonce=new_nonce(),
            state="released",
            checkpoints=tuple(entries),
        )
        try:
            head.write(store, None)
        except PreconditionFailedError:
            _refuse_other_start(store, head, run.store.uri)
            return
        # Copies from another extension that was killed: no takeover would sweep them.
        for name in store.folders(CHECKPOINTS) - {entry.name for entry in entries}:
            store.delete_below(checkpoint_prefix(name))
        _log.info(f"[ok] {store.uri} starts from the end of {run.store.uri}, step {end.step}")

    @cached_property
    def state(self) -> dict[str, Any]:
        """The JSON of that end's checkpoint."""
        store, end = self.run.store, self.end
        found = store.get(checkpoint_prefix(end.name) + STATE)
        if found is None:
            raise UserError(f"checkpoint {end.name} of {store.uri} lacks its {STATE}")
        state: dict[str, Any] = json.loads(found.data)
        return state

    def _reopened(self, store: Store) -> CheckpointEntry:
        """Turn the end of the stage into a boundary within it, by a state.json of its own."""
        end, position = self.end, self.state["position"]
        results = {n: found for n, found in position["results"].items() if n != end.stage}
        position = {**position, "has_ended": False, "results": results}
        state = json.dumps({**self.state, "position": position}).encode()
        mine = put_text(store, checkpoint_prefix(end.name), STATE, state)
        files = tuple(mine if file.name == STATE else file for file in end.files)
        return replace(end, kind="periodic", files=files)


def _refuse_other_start(store: Store, mine: Head, origin: str) -> None:
    """Raise UserError unless the head was created by this attempt or an equal one."""
    theirs = Head.read(store)
    if theirs is None or (theirs.generation == 0 and theirs.checkpoints != mine.checkpoints):
        raise UserError(
            f"the run {store.uri} does not start from the end of {origin}; extend the run that it "
            "was begun for, or use another run URI"
        )


def _copy(old: Store, new: Store, prefix: str, folder: Path, *, without: str = "") -> None:
    """Copy the keys below the prefix; JSON indexes last, as they promise that the rest exists."""
    keys = sorted(old.sizes(prefix).keys() - {without}, key=lambda key: key.endswith(".json"))
    for key in keys:
        path = folder / "file"
        old.get_file(key, path)
        new.put_file(key, path)
        path.unlink()
