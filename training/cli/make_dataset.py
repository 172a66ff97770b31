"""`python -m training data make | import`: a workload's dataset, generated or from your own files.

The same command continues an interrupted import into shards. At its end, as after `data check`, it
prints what follows for a run: overrides, the size and its dollars, the commands.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import Exit, UserError
from contract.grammar import argument_type, parse_place
from contract.keys import MANIFEST, UNFINISHED
from contract.readable import readable
from training.cli.next_commands import show_next
from training.cli.run import add_override, checked_folder, positive_int
from training.durable import (
    Brought,
    FileProgressBar,
    FolderOutput,
    ImportSource,
    LocalDataset,
    MachineError,
    Output,
    ProgressBar,
    Store,
    StoredDataset,
    StoreOutput,
    open_store,
    stored_source,
)
from training.registry import facts_of

if TYPE_CHECKING:
    from training.workload import Workload

URI = "s3://bucket/prefix, or a folder"


def add_make(make: argparse.ArgumentParser) -> None:
    """Add the options of `data make`."""
    make.add_argument("--workload", required=True)
    make.add_argument("--out", required=True, type=Path, help="an empty or new folder")
    make.add_argument("--count", required=True, type=positive_int, help="number of samples")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--dataset-uri", help=f"also upload it to {URI}")
    _add_override(make)
    make.set_defaults(act=_make)


def add_import(bring: argparse.ArgumentParser) -> None:
    """Add the options of `data import`."""
    bring.description = (
        "Make a workload's dataset from your own files: a folder, zip or tar archive with FILE or "
        "CLASS/FILE, also below folders train, validation and test, a CSV with the columns file, "
        "class (or path, label) and, if wanted, split, or a single file; images also from "
        "s3://bucket/prefix. Clips and images need classes, text needs none. The same command "
        "continues an interrupted import of clips, text or images. A detector's source is a folder "
        "in COCO's format (COCO, Roboflow, CVAT, Label Studio), or in that of YOLO, Pascal VOC, "
        "LabelMe or KITTI."
    )
    what = "a folder, file, CSV file, zip or tar archive; s3://..."
    bring.add_argument("source", type=argument_type(parse_place), help=what)
    bring.add_argument("--workload", required=True)
    bring.add_argument("--out", type=Path, help="an empty or new folder")
    bring.add_argument("--seed", type=int, default=0, help="decides the splits if you specify none")
    bring.add_argument(
        "--dataset-uri",
        help=f"also upload it to {URI}; images without --out go there as they are packed",
    )
    bring.add_argument("--json", action="store_true", help="print what was made as JSON")
    _add_override(bring)
    bring.set_defaults(act=_import)


def _add_override(parser: argparse.ArgumentParser) -> None:
    add_override(
        parser,
        "for clips: difficulty (make), sampling, lists, left_out_share; for text: tokenizer (a "
        "file or folder), vocab_size, separator, held_out_of; for images: shorter_side, quality, "
        "left_out_share, validation_classes",
    )


def _make(options: argparse.Namespace) -> int:
    workload = _workload(options)
    _check_folder(options.out, workload.name)
    store = open_store(options.dataset_uri) if options.dataset_uri else None
    checked_folder(options.out)
    began = time.monotonic()
    with _whole_folder(options.out):
        with ProgressBar(f"making {options.count} samples", options.count) as bar:
            meta = workload.make_dataset(
                options.out,
                options.count,
                options.seed,
                lambda done, total: bar.show(done, "", total),
            )
        _finish_making(options.out, workload.name, meta, began)
    print(f"[data] {facts_of(meta)}")
    return Exit.FINISHED if store is None else send(options.out, store)


def _import(options: argparse.Namespace) -> int:
    # Everything else goes to stderr, so that the JSON can be piped.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        workload = _workload(options)
        manifest = _imported(options, workload)
        where = str(options.out or options.dataset_uri)
        follows = show_next(options.workload, workload, manifest, where, options.dataset_uri)
    if options.json:
        print(json.dumps(follows, indent=1))
    return Exit.FINISHED


def _imported(options: argparse.Namespace, workload: "Workload[Any]") -> Mapping[str, Any]:
    """Make the dataset and upload it if this was asked for; return its manifest."""
    from training.workload import Workload, implements

    with tempfile.TemporaryDirectory(prefix="training-import-") as scratch:
        if implements(workload, Workload.pack_dataset):
            return _import_packed(options, workload.name, workload, Path(scratch))
        if options.out is None:
            raise UserError(f"workload {workload.name!r} makes its dataset in a folder; add --out")
        _check_folder(options.out, workload.name)
        store = open_store(options.dataset_uri) if options.dataset_uri else None
        began = time.monotonic()
        act: Callable[..., Mapping[str, Any]]
        if implements(workload, Workload.import_folder):
            source: Any = ImportSource(Path(options.source), Path(scratch)).folder()
            act, what, total = workload.import_folder, source.name, 0
        else:
            source = ImportSource(Path(options.source), Path(scratch)).files()
            act, what, total = workload.import_dataset, f"{len(source)} files", len(source)
        checked_folder(options.out)
        with _whole_folder(options.out):
            with ProgressBar(f"importing {what}", total) as bar:
                meta = act(
                    source, options.out, options.seed, lambda done, total: bar.show(done, "", total)
                )
            manifest = _finish_making(options.out, workload.name, meta, began)
    if store is not None:
        send(options.out, store)
    return manifest


def _import_packed(
    options: argparse.Namespace, name: str, packing: "Workload[Any]", scratch: Path
) -> Mapping[str, Any]:
    """Pack files into the folder, or without one straight into the store; return the manifest."""
    output = _output(options, name)
    if output.read(MANIFEST) is None:
        is_stored = options.source.startswith("s3://")
        files: Sequence[Brought] = (
            stored_source(options.source)
            if is_stored
            else ImportSource(Path(options.source), scratch).files()
        )
        began = time.monotonic()
        try:
            with _RateBar(f"packing {len(files)} files") as bar:
                made = packing.pack_dataset(files, output, options.seed, bar)
            StoredDataset.complete(output, name, made)
        except OSError as error:
            raise UserError(
                f"{error.filename or output.where} cannot be written: {error.strerror or error}; "
                "run the same command again once it can: finished parts stay"
            ) from error
        _print_made(made.files, began)
    output.clean_up()
    if options.out is not None and options.dataset_uri:
        send(options.out, open_store(options.dataset_uri))
    manifest: Mapping[str, Any] = json.loads(output.read(MANIFEST) or b"")
    return manifest


class _RateBar(ProgressBar):
    """Progress with the rate so far; the first call sets the number and what was done before."""

    def __call__(self, done: int, total: int) -> None:
        if not self._total:
            self._first, self._began = done, time.monotonic()
            self._begin(total)
        elif self.is_due or done == total:
            rate = (done - self._first) / max(time.monotonic() - self._began, 1e-9)
            self.show(done, f"{readable(rate)}/s" if done > self._first else "", total)


def _output(options: argparse.Namespace, workload: str) -> Output:
    """Return where to make the dataset; UserError if it cannot be made there."""
    if options.out is not None:
        _check_folder(options.out, workload)
        checked_folder(options.out)
        return FolderOutput(options.out.resolve())
    if not options.dataset_uri:
        raise UserError("pass --out for a folder, or --dataset-uri to pack straight into a store")
    output = StoreOutput(uri=open_store(options.dataset_uri).uri)
    if (unfinished := output.read(UNFINISHED)) is not None:
        _check_unfinished(unfinished, output.where, workload)
    elif there := output.sizes():
        raise UserError(f"{output.where} is not empty: it has {min(there)}; use a new prefix")
    return output


def _workload(options: argparse.Namespace) -> "Workload[Any]":
    """Load the workload, with the options for its datasets."""
    from training.registry import load_workload, parse_overrides, with_overrides

    workload = load_workload(options.workload)
    overrides = parse_overrides(options.override)
    if not overrides:
        return workload
    if workload.data_options is None:
        raise UserError(
            f"workload {workload.name!r} makes its datasets in one way: it has no data_options "
            "(training/workload.py); leave --override out"
        )
    what = f"a dataset of workload {workload.name!r}"
    return workload.with_data_options(with_overrides(workload.data_options, overrides, what))


def _check_folder(out: Path, workload: str) -> None:
    """Raise UserError unless the folder is new or has this workload's unfinished dataset."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; use a new folder")
    if (out / UNFINISHED).is_file():
        _check_unfinished((out / UNFINISHED).read_bytes(), str(out), workload)
    elif out.exists() and any(path.name != f"{UNFINISHED}.part" for path in out.iterdir()):
        raise UserError(f"{out} is not empty; use a new folder")


def _check_unfinished(record: bytes, where: str, workload: str) -> None:
    """Raise UserError unless an import of this workload was interrupted there."""
    if json.loads(record).get("workload") != workload:
        raise UserError(f"{where} has an unfinished dataset of another workload; use a new folder")
    print(f"[ok] resuming the unfinished dataset in {where}")


def _finish_making(
    out: Path, workload: str, meta: Mapping[str, Any], began: float
) -> Mapping[str, Any]:
    manifest: Mapping[str, Any] = LocalDataset.complete(out, workload, meta).manifest
    _print_made(manifest["files"], began)
    if "vocab_size" in meta:
        print(f"vocabulary: {meta['vocab_size']:,} tokens, tokenizer: {meta.get('tokenizer', '-')}")
    return manifest


def _print_made(files: Sequence[Mapping[str, Any]], began: float) -> None:
    size = sum(entry["bytes"] for entry in files) / 1e6
    seconds = time.monotonic() - began
    print(f"[ok] dataset made: {len(files)} files, {size:.1f} MB in {seconds:.1f} s")


def send(folder: Path, store: Store) -> int:
    with FileProgressBar("uploading") as show:
        done = StoredDataset(store).upload(folder, show)
    print(
        f"[ok] dataset uploaded: {done.fetched_files} of {done.files} files, "
        f"{done.fetched_bytes / 1e6:.1f} of {done.bytes / 1e6:.1f} MB in {done.seconds:.1f} s"
    )
    return Exit.FINISHED


@contextmanager
def _whole_folder(path: Path) -> Iterator[None]:
    """Fill a new folder or leave it empty, unless what is in it can be continued."""
    try:
        yield
    except BaseException as error:
        left = "the same command continues from what was made"
        if not (path / UNFINISHED).exists():
            shutil.rmtree(path, ignore_errors=True)
            left = "what was made has been deleted"
        # Some libraries, such as safetensors, raise their own error with the system's text.
        if full := re.search("No space left on device|File too large|quota exceeded", str(error)):
            raise MachineError(
                f"{path} cannot be written: {full[0]}; {left}: make room, or pass a folder on "
                "another disk with --out"
            ) from error
        raise
