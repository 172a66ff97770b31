"""`python -m training data make | import | check | upload | sync`. The first two import torch."""

import argparse
import json
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.program import WORKLOAD as PROGRAM
from training.cli.outputs import checked_folder
from training.errors import EXIT_FINISHED, EXIT_NO_MANIFEST, UserError
from training.record.events import Events
from training.report.progress import FileProgressBar, ProgressBar
from training.sources import UNFINISHED, open_folder, open_source
from training.store.dataset import sync_dataset, upload_dataset, wait_for_manifest
from training.store.local_dataset import is_programs_own, open_dataset, write_manifest
from training.store.open import open_store
from training.store.protocol import Store

if TYPE_CHECKING:
    from training.capabilities import HasFolderImport
    from training.workload import Workload

_URI = "s3://bucket/prefix, or a folder"


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `data`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser("make", help="make a workload's dataset in a new folder")
    make.add_argument("--workload", required=True)
    make.add_argument("--out", required=True, type=Path, help="an empty or new folder")
    make.add_argument("--count", required=True, type=int, help="number of samples")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--dataset-uri", help=f"also upload it to {_URI}")
    _add_override(make)
    make.set_defaults(act=_make)
    bring = commands.add_parser("import", help="make a workload's dataset of files of your own")
    bring.description = (
        "Make a workload's dataset of your own files: a folder, zip or tar archive with FILE or "
        "CLASS/FILE, also below folders train, validation and test, a CSV with the columns file, "
        "class and, if wanted, split, or a single file. Clips need classes, text needs none. An "
        "interrupted import of text goes on with the same command. A detector's source is a folder "
        "in COCO's format, as COCO, Roboflow, CVAT or Label Studio write it."
    )
    bring.add_argument("source", type=Path, help="a folder, file, CSV file, zip or tar archive")
    bring.add_argument("--workload", required=True)
    bring.add_argument("--out", required=True, type=Path, help="an empty or new folder")
    bring.add_argument("--seed", type=int, default=0, help="decides the splits if you give none")
    bring.add_argument("--dataset-uri", help=f"also upload it to {_URI}")
    _add_override(bring)
    bring.set_defaults(act=_import)
    check = commands.add_parser("check", help="verify a folder against its manifest")
    check.description = (
        "Verify a folder's files against its manifest. With --workload also check what is in them, "
        "before or after an import: exit code 2 if training would break."
    )
    check.add_argument("folder", type=Path)
    check.add_argument("--workload", help="check what is in the files, as this workload reads it")
    check.add_argument("--json", action="store_true", help="print what was found as JSON")
    check.set_defaults(act=_check)
    upload = commands.add_parser("upload", help="upload a folder, the manifest last")
    upload.description = (
        "Upload a folder, the manifest last. A folder without a manifest is a program's: its "
        "manifest is made of all files in it, and made again at each upload."
    )
    upload.add_argument("folder", type=Path)
    upload.add_argument("--dataset-uri", required=True, help=_URI)
    upload.set_defaults(act=_upload)
    sync = commands.add_parser("sync", help="fetch what is missing and verify everything")
    sync.add_argument("--dataset-uri", required=True, help=_URI)
    sync.add_argument("--out", required=True, type=Path)
    sync.add_argument(
        "--wait-seconds",
        type=float,
        default=0.0,
        help="how long to wait for a manifest; exit code 3 if none appears (default: %(default)s)",
    )
    sync.add_argument("--run-uri", help="write events dataset-missing and dataset-synced there")
    sync.add_argument("--writer", default=socket.gethostname(), help="writer of these events")
    sync.set_defaults(act=_sync)


def _add_override(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of text: tokenizer (a file or folder), vocab_size, separator, held_out_of",
    )


def _make(options: argparse.Namespace) -> int:
    if options.count < 1:
        raise UserError(f"--count is {options.count}; give at least 1")
    workload = _workload(options)
    store = open_store(options.dataset_uri) if options.dataset_uri else None
    checked_folder(options.out)
    began = time.monotonic()
    with ProgressBar(f"making {options.count} samples", options.count) as bar:
        meta = workload.make_dataset(
            options.out, options.count, options.seed, lambda done, total: bar.show(done, "", total)
        )
    _finish_making(options.out, workload.name, meta, began)
    return EXIT_FINISHED if store is None else _send(options.out, store)


def _import(options: argparse.Namespace) -> int:
    from training.capabilities import HasFolderImport, HasImport

    workload = _workload(options)
    if isinstance(workload, HasFolderImport):
        return _import_folder(workload.name, workload, options)
    if not isinstance(workload, HasImport):
        raise UserError(
            f"workload {workload.name!r} cannot import files: it has no import_dataset "
            "(HasImport in training/capabilities.py)"
        )
    store = open_store(options.dataset_uri) if options.dataset_uri else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="training-import-") as scratch:
        files = open_source(options.source, Path(scratch))
        checked_folder(options.out)
        with ProgressBar(f"importing {len(files)} files", len(files)) as bar:
            meta = workload.import_dataset(
                files, options.out, options.seed, lambda done, total: bar.show(done, "", total)
            )
    _finish_making(options.out, workload.name, meta, began)
    if "classes" in meta:
        counts = sorted(Counter(str(file.label) for file in files).items())
        print("classes: " + ", ".join(f"{name} ({count})" for name, count in counts))
    return EXIT_FINISHED if store is None else _send(options.out, store)


def _import_folder(name: str, workload: "HasFolderImport", options: argparse.Namespace) -> int:
    """Import a folder with a layout that only the workload knows."""
    store = open_store(options.dataset_uri) if options.dataset_uri else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="training-import-") as scratch:
        folder = open_folder(options.source, Path(scratch))
        checked_folder(options.out)
        with ProgressBar(f"importing {options.source.name}", 0) as bar:
            meta = workload.import_folder(
                folder, options.out, options.seed, lambda done, total: bar.show(done, "", total)
            )
    _finish_making(options.out, name, meta, began)
    print(", ".join(f"{split}: {count:,} images" for split, count in meta["splits"].items()))
    return EXIT_FINISHED if store is None else _send(options.out, store)


def _workload(options: argparse.Namespace) -> "Workload[Any]":
    """The workload, with the options of its datasets; UserError if its folder cannot be used."""
    from training.capabilities import HasDataOptions
    from training.config import parse_overrides, with_overrides
    from training.workloads import load_workload

    _check_folder(options.out)
    workload = load_workload(options.workload)
    if (options.out / UNFINISHED).is_file():
        _check_unfinished(options.out, workload.name)
    overrides = parse_overrides(options.override)
    if not overrides:
        return workload
    if not isinstance(workload, HasDataOptions):
        raise UserError(
            f"workload {workload.name!r} makes its datasets in one way: it has no data_options "
            "(HasDataOptions in training/capabilities.py); leave --override out"
        )
    what = f"a dataset of workload {workload.name!r}"
    return workload.with_data_options(with_overrides(workload.data_options, overrides, what))


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a new folder")
    if out.exists() and any(out.iterdir()) and not (out / UNFINISHED).is_file():
        raise UserError(f"{out} is not empty; give a new folder")


def _check_unfinished(out: Path, workload: str) -> None:
    """UserError unless an import of this workload was interrupted in this folder."""
    if json.loads((out / UNFINISHED).read_bytes()).get("workload") != workload:
        raise UserError(f"{out} has an unfinished dataset of another workload; give a new folder")
    print(f"[ok] goes on with the unfinished dataset in {out}")


def _finish_making(out: Path, workload: str, meta: Mapping[str, Any], began: float) -> None:
    files = write_manifest(out, workload, meta).manifest["files"]
    size = sum(entry["bytes"] for entry in files) / 1e6
    seconds = time.monotonic() - began
    print(f"[ok] dataset made: {len(files)} files, {size:.1f} MB in {seconds:.1f} s")
    if "vocab_size" in meta:
        print(f"vocabulary: {meta['vocab_size']:,} tokens, tokenizer: {meta['tokenizer']}")
        for name, split in meta["splits"].items():
            print(f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens")


def _check(options: argparse.Namespace) -> int:
    if options.workload:
        from training.cli.data_check import check_content

        return check_content(options.workload, options.folder, as_json=options.json)
    if options.json:
        raise UserError("--json prints what was found in the files; give --workload as well")
    dataset = open_dataset(options.folder, again=True)
    files = dataset.manifest["files"]
    size = sum(entry["bytes"] for entry in files) / 1e6
    print(f"[ok] dataset verified: {len(files)} files, {size:.1f} MB")
    return EXIT_FINISHED


def _upload(options: argparse.Namespace) -> int:
    if (options.folder / UNFINISHED).is_file():
        raise UserError(
            f"{options.folder} has an unfinished dataset; finish it with the command that began it"
        )
    if is_programs_own(options.folder):
        write_manifest(options.folder, PROGRAM, {})
    return _send(options.folder, open_store(options.dataset_uri))


def _send(folder: Path, store: Store) -> int:
    with FileProgressBar("uploading") as show:
        done = upload_dataset(folder, store, show)
    print(
        f"[ok] dataset uploaded: {done.fetched_files} of {done.files} files, "
        f"{done.fetched_bytes / 1e6:.1f} of {done.bytes / 1e6:.1f} MB in {done.seconds:.1f} s"
    )
    return EXIT_FINISHED


def _sync(options: argparse.Namespace) -> int:
    store = open_store(options.dataset_uri)
    events = Events(open_store(options.run_uri), options.writer) if options.run_uri else None

    def missing() -> None:
        command = f"python -m training data upload DIR --dataset-uri {options.dataset_uri}"
        message = f"{store.uri} has no manifest.json yet; upload a dataset: {command}"
        print(f"[waiting {options.wait_seconds:g} s] {message}", flush=True)
        if events:
            events.emit("dataset-missing", "info", message=message)

    if not wait_for_manifest(store, options.wait_seconds, missing):
        print(f"[failed] no manifest.json appeared within {options.wait_seconds:g} s", flush=True)
        return EXIT_NO_MANIFEST
    checked_folder(options.out)
    with FileProgressBar("syncing") as show:
        done = sync_dataset(store, options.out, show)
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
    return EXIT_FINISHED
