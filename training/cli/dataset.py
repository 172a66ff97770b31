"""`python -m training data make | import | check | upload | sync`.

The first two, which import torch, are in make_dataset.py.
"""

import argparse
import json
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

from contract.errors import Exit, UserError
from contract.grammar import argument_type, parse_place, parse_seconds
from contract.keys import MANIFEST
from contract.progress import progress_record
from contract.readable import table
from training.cli.make_dataset import URI, add_import, add_make, send
from training.cli.run import add_writer, checked_folder
from training.durable import (
    Events,
    FileProgressBar,
    LocalDataset,
    ProgressBar,
    StoredDataset,
    open_store,
)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `data`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_make(commands.add_parser("make", help="make a workload's dataset in a new folder"))
    add_import(commands.add_parser("import", help="make a workload's dataset from your own files"))
    check = commands.add_parser("check", help="verify a folder against its manifest")
    check.description = (
        "Verify a folder's files against its manifest. With --workload, also check their content, "
        "before or after an import: exit code 2 if training would break."
    )
    check.add_argument("folder", type=_folder)
    check.add_argument("--workload", help="check what is in the files, as this workload reads it")
    check.add_argument("--json", action="store_true", help="print what was found as JSON")
    check.set_defaults(act=_check)
    upload = commands.add_parser("upload", help="upload a folder, the manifest last")
    upload.description = (
        "Upload a folder, the manifest last. A folder without a manifest is taken as a program's: "
        "its manifest lists all files in it at each upload, and is written to the store only."
    )
    upload.add_argument("folder", type=_folder)
    upload.add_argument("--dataset-uri", required=True, help=URI)
    upload.set_defaults(act=_upload)
    sync = commands.add_parser("sync", help="fetch what is missing and verify everything")
    sync.add_argument("--dataset-uri", required=True, help=URI)
    sync.add_argument("--out", required=True, type=Path)
    sync.add_argument(
        "--wait-seconds",
        type=argument_type(parse_seconds),
        default=0.0,
        help="how long to wait for a manifest; exit code 3 if none appears (default: %(default)s)",
    )
    sync.add_argument(
        "--begun-file", type=Path, help="count here what is there, once a trainer can open it"
    )
    sync.add_argument("--run-uri", help="write events dataset-missing and dataset-synced there")
    add_writer(sync, "writer of these events")
    sync.set_defaults(act=_sync)


def _folder(text: str) -> Path:
    return Path(argument_type(parse_place)(text))


def _check(options: argparse.Namespace) -> int:
    if options.workload:
        return _check_content(options.workload, options.folder, as_json=options.json)
    if options.json:
        raise UserError("--json prints what was found in the files; add --workload")
    dataset = LocalDataset.open(options.folder, again=True)
    files = dataset.manifest["files"]
    size = sum(entry["bytes"] for entry in files) / 1e6
    print(f"[ok] dataset verified: {len(files)} files, {size:.1f} MB")
    return Exit.FINISHED


def _upload(options: argparse.Namespace) -> int:
    return send(options.folder, open_store(options.dataset_uri))


def _sync(options: argparse.Namespace) -> int:
    store = open_store(options.dataset_uri)
    dataset = StoredDataset(store)
    events = Events(open_store(options.run_uri), options.writer) if options.run_uri else None

    def missing() -> None:
        command = f"python -m training data upload DIR --dataset-uri {options.dataset_uri}"
        message = f"{store.uri} has no manifest.json yet; upload a dataset: {command}"
        print(f"[waiting {options.wait_seconds:g} s] {message}", flush=True)
        if events:
            events.emit("dataset-missing", "info", message=message)

    def begun() -> None:
        if options.begun_file is not None:
            options.begun_file.touch()

    if not dataset.wait(options.wait_seconds, missing):
        print(f"[failed] no manifest.json appeared within {options.wait_seconds:g} s", flush=True)
        return Exit.NO_MANIFEST
    checked_folder(options.out)
    with FileProgressBar("syncing") as show:

        def progress(done: int, total: int, size: int) -> None:
            if options.begun_file is not None and (show.is_due or done == total):
                with suppress(OSError):  # a sync must not fail because of it
                    options.begun_file.write_bytes(progress_record("dataset", done, size))
            show(done, total, size)

        done = dataset.sync(options.out, progress, begun)
    print(
        f"[ok] dataset synced: {done.files} files, {done.bytes / 1e6:.1f} MB, "
        f"{done.megabytes_per_second:.1f} MB/s",
        flush=True,
    )
    if events:
        events.emit(
            "dataset-synced",
            "ok",
            files=done.files,
            bytes=done.bytes,
            fetched_files=done.fetched_files,
            fetched_bytes=done.fetched_bytes,
            seconds=round(done.seconds, 4),
        )
    return Exit.FINISHED


def _check_content(name: str, folder: Path, *, as_json: bool) -> int:
    """Print what the workload finds; UserError, exit code 2, if training would break."""
    # Not at the top: they import torch, and a sync runs at boot.
    from training.cli.next_commands import show_next
    from training.registry import load_workload
    from training.workload import Workload, implements

    workload = load_workload(name)
    if not implements(workload, Workload.check_data):
        raise UserError(
            f"workload {workload.name!r} cannot check what is in a dataset: it has no check_data "
            "(training/workload.py); leave --workload out"
        )
    # Progress goes to stderr, so that what is found can be piped.
    dataset = None
    with redirect_stdout(sys.stderr):
        if (folder / MANIFEST).is_file():
            dataset = LocalDataset.open(folder, again=True)
        with ProgressBar(f"checking {folder.name}", 0) as bar:
            report = workload.check_data(
                folder, lambda done, total: bar.show(done, "images", total)
            )
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        for title, rows in report.tables.items():
            print("\n".join([title, *table(rows), ""]))
        for finding in report.findings:
            print(f"[{'refused' if finding.is_refused else 'warning'}] {finding.message}")
        if not report.refusals:
            print(f"[ok] {folder} can be trained on; warnings: {len(report.warnings)}")
    if refused := [finding.rule for finding in report.refusals]:
        raise UserError(f"{folder} cannot be trained on: it was refused for {', '.join(refused)}")
    if dataset is not None and not as_json:
        show_next(name, workload, dataset.manifest, str(folder), None)
    elif not as_json:
        print(f"next:\n    python -m training data import {folder} --workload {name} --out data")
    return Exit.FINISHED
