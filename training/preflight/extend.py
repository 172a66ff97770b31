"""Extends a finished run as a new run that starts from the old one's end: `--extend-to`.

A new run, because finished is final: its receipt was read, its fleet is gone. The new run's head is
created with copies of the old one's last checkpoints, and a normal resume does the rest. From there
the learning rate follows the schedule of the longer training.
"""

import hashlib
import json
import logging
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.grammar import parse_span
from contract.keys import CHECKPOINTS, CONFIG, artifact_prefix, checkpoint_prefix
from training.engine.job import RunOptions
from training.engine.origin import Origin, origin_from_weights
from training.errors import UserError
from training.record.checkpoint_entry import CheckpointEntry, FileEntry
from training.record.head import Head, read_head, write_head
from training.record.open_run import OpenRun
from training.record.run_config import read_run_config
from training.save.state import STATE
from training.save.weights import open_trained
from training.store.protocol import PreconditionFailedError, Store
from training.workload import Workload

_log = logging.getLogger(__name__)


def resolve_origin(options: RunOptions, workload: Workload[Any], config: Any) -> Origin | None:
    """What the run starts from: as its config.json says, else as the options say now."""
    store = options.store
    record = read_run_config(store)
    if record is not None and (record.origin or not options.init_from):
        return Origin.from_json(record.origin) if record.origin else None
    if not options.extend_to:
        _refuse_unfinished_copy(store)
    if not options.init_from:
        if options.extend_to:
            raise UserError("--extend-to needs --init-from with the URI of the run to extend")
        return None
    if not options.extend_to:
        return origin_from_weights(options.init_from, workload, config)
    old = open_trained(options.init_from)
    theirs = (old.record.workload, old.record.recipe, dict(old.record.overrides))
    if theirs != (options.workload, options.recipe, dict(options.overrides)):
        raise UserError(
            f"{old.store.uri} is a run of {theirs[0]}, recipe {theirs[1]}, with the overrides "
            f"{theirs[2] or '(none)'}; extend it with exactly these"
        )
    origin = extended(old, options.extend_to)
    create_extended(old, store, options.run_id, options.writer)
    return origin


def _refuse_unfinished_copy(store: Store) -> None:
    """Refuse to begin a run among copies: its config.json would keep the right command out."""
    head = read_head(store)
    is_begun = head is not None and head.generation > 0
    if not is_begun and store.folders(CHECKPOINTS) and read_run_config(store) is None:
        raise UserError(
            f"{store.uri} has checkpoints but no {CONFIG}: repeat the command with --extend-to "
            f"if it was interrupted; otherwise restore the last version of {CONFIG}, or give "
            "another run URI"
        )


def extended(run: OpenRun, text: str) -> Origin:
    """The origin that `--extend-to` asks for: `8epochs` or `4000steps` of the last Train stage."""
    end = _end(run)
    span = parse_span(text)
    if span is None:
        raise UserError(f"--extend-to {text!r} cannot be read; write 8epochs or 4000steps")
    steps: int = _state(run.store, end)["position"]["stage_step"]
    if span.value <= (end.epoch if span.unit == "epochs" else steps):
        raise UserError(
            f"--extend-to {text}: the run {run.store.uri} has already trained stage {end.stage!r} "
            f"for {steps} steps, {end.epoch} whole epochs; give more"
        )
    assert run.head.weights_sha256 is not None
    return Origin(
        uri=run.store.uri,
        weights_sha256=run.head.weights_sha256,
        stage=end.stage,
        **{span.unit: span.value},
        dataset=run.record.dataset,
    )


def create_extended(run: OpenRun, store: Store, run_id: str, writer: str) -> None:
    """Create the head of the new run at `store`; no-op if it has one from the same end."""
    end = _end(run)
    entries = []
    with tempfile.TemporaryDirectory(prefix="extend-") as folder:
        for entry in run.head.checkpoints:
            prefix = checkpoint_prefix(entry.name)
            if entry == end:
                # Never their state: another machine may have begun this run, with its own there.
                _copy(run.store, store, prefix, Path(folder), without=prefix + STATE)
                entries.append(_reopened(run.store, store, entry))
            elif entry.kind == "stage-end" and entry.stage != end.stage:
                _copy(run.store, store, prefix, Path(folder))
                entries.append(entry)
        for key in _state(run.store, end)["position"]["artifacts"].values():
            _copy(run.store, store, artifact_prefix(key), Path(folder))
    head = Head(
        run_id=run_id,
        generation=0,
        writer=writer,
        nonce=secrets.token_hex(8),
        state="released",
        checkpoints=tuple(entries),
    )
    try:
        write_head(store, head, None)
    except PreconditionFailedError:
        _refuse_other_start(store, head, run.store.uri)
        return
    # Copies for another extension, which was killed: no take-over would sweep them.
    for name in store.folders(CHECKPOINTS) - {entry.name for entry in entries}:
        store.delete_below(checkpoint_prefix(name))
    _log.info(f"[ok] {store.uri} starts from the end of {run.store.uri}, step {end.step}")


def _refuse_other_start(store: Store, mine: Head, origin: str) -> None:
    """Raise UserError unless the head was created by this attempt or an equal one."""
    theirs = read_head(store)
    if theirs is None or (theirs.generation == 0 and theirs.checkpoints != mine.checkpoints):
        raise UserError(
            f"the run {store.uri} does not start from the end of {origin}; extend the run that it "
            "was begun for, or give another run URI"
        )


def _end(run: OpenRun) -> CheckpointEntry:
    if run.head.state != "finished":
        raise UserError(
            f"the run {run.store.uri} is {run.head.state}; only a finished run can be extended"
        )
    return next(e for e in reversed(run.head.checkpoints) if e.kind == "stage-end")


def _reopened(old: Store, new: Store, entry: CheckpointEntry) -> CheckpointEntry:
    """Turn the end of a stage into a boundary within it, by a new state.json in the new run."""
    state = _state(old, entry)
    position = state["position"]
    position["has_ended"] = False
    position["results"].pop(entry.stage)
    data = json.dumps(state).encode()
    new.put(checkpoint_prefix(entry.name) + STATE, data)
    mine = FileEntry(name=STATE, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    files = tuple(mine if file.name == STATE else file for file in entry.files)
    return replace(entry, kind="periodic", files=files)


def _state(store: Store, entry: CheckpointEntry) -> Any:
    found = store.get(checkpoint_prefix(entry.name) + STATE)
    if found is None:
        raise UserError(f"checkpoint {entry.name} of {store.uri} lacks its {STATE}")
    return json.loads(found.data)


def _copy(old: Store, new: Store, prefix: str, folder: Path, *, without: str = "") -> None:
    """Copy the keys below the prefix; JSON indexes last, as they promise that the rest exists."""
    keys = sorted(old.sizes(prefix).keys() - {without}, key=lambda key: key.endswith(".json"))
    for key in keys:
        path = folder / "file"
        old.get_file(key, path)
        new.put_file(key, path)
        path.unlink()
