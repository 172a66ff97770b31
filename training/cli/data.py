"""`python -m training data make | import | check | upload | sync`.

`make` and `import` write a workload's dataset, generated or from your own files; the same command
continues an interrupted import into shards. Both, and `check --workload`, end with what follows for
a run: overrides, the size and its dollars, the commands. Only they import torch.
"""

import argparse
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import Exit, UserError
from contract.grammar import argument_type, parse_place, parse_seconds
from contract.keys import MANIFEST, UNFINISHED
from contract.progress import progress_record
from contract.readable import readable, table
from training.cli.run import add_override, add_writer, checked_folder, positive_int
from training.durable import (
    Brought,
    DataRefusedError,
    DataReport,
    Events,
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
    class_names,
    open_store,
    stored_source,
)
from training.registry import (
    WORKLOADS,
    facts_of,
    fitted,
    how_without_import,
    imports_data,
    load_workload,
    module_of,
    parse_overrides,
    with_overrides,
    workable,
)

if TYPE_CHECKING:
    from training.workload import Workload

_URI = "s3://bucket/prefix, or a folder"
_ROOT = Path(__file__).parents[2]
# GiB of a data volume unless its size is set, and those that a dataset of 1 GiB needs.
_USUAL_GIB, _VOLUME_PER_DATASET = 200, 1.1


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `data`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_make(commands.add_parser("make", help="make a workload's dataset in a new folder"))
    _add_import(commands.add_parser("import", help="make a workload's dataset from your own files"))
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
    upload.add_argument("--dataset-uri", required=True, help=_URI)
    upload.set_defaults(act=_upload)
    sync = commands.add_parser("sync", help="fetch what is missing and verify everything")
    add = sync.add_argument
    add("--dataset-uri", required=True, help=_URI)
    add("--out", required=True, type=Path)
    add(
        "--wait-seconds",
        type=argument_type(parse_seconds),
        default=0.0,
        help="how long to wait for a manifest; exit code 3 if none appears (default: %(default)s)",
    )
    add("--begun-file", type=Path, help="count here what is there, once a trainer can open it")
    add("--run-uri", help="write events dataset-missing and dataset-synced there")
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
    return _send(options.folder, open_store(options.dataset_uri))


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
    # Not at the top: it imports torch, and a sync runs at boot.
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


def _add_make(make: argparse.ArgumentParser) -> None:
    """Add the options of `data make`."""
    make.add_argument("--workload", required=True)
    make.add_argument("--out", required=True, type=Path, help="an empty or new folder")
    make.add_argument("--count", required=True, type=positive_int, help="number of samples")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--dataset-uri", help=f"also upload it to {_URI}")
    _add_override(make)
    make.set_defaults(act=_make)


def _add_import(bring: argparse.ArgumentParser) -> None:
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
        help=f"also upload it to {_URI}; images without --out go there as they are packed",
    )
    bring.add_argument("--json", action="store_true", help="print what was made as JSON")
    _add_override(bring)
    bring.set_defaults(act=_import)


def _add_override(parser: argparse.ArgumentParser) -> None:
    add_override(
        parser,
        "for clips: difficulty (make), validation_share, sampling, lists, left_out_share; for "
        "text: tokenizer (a file or folder), vocab_size, separator, held_out_of; for images: "
        "shorter_side, quality, left_out_share, validation_classes",
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
    return Exit.FINISHED if store is None else _send(options.out, store)


def _import(options: argparse.Namespace) -> int:
    # Everything else goes to stderr, so that the JSON can be piped.
    try:
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            workload = _workload(options)
            manifest, report = _imported(options, workload)
            where = str(options.out or options.dataset_uri)
            follows = show_next(options.workload, workload, manifest, where, options.dataset_uri)
    except DataRefusedError as error:
        if options.json:
            print(json.dumps(error.report.as_json(), indent=1))
        raise
    if options.json:
        warned = {"warned": report.as_json()["warned"]} if report else {}
        print(json.dumps({**follows, **warned}, indent=1))
    return Exit.FINISHED


def _imported(
    options: argparse.Namespace, workload: "Workload[Any]"
) -> tuple[Mapping[str, Any], DataReport | None]:
    """Make the dataset, upload it if this was asked for; return its manifest and its report."""
    from training.workload import Workload, implements

    with tempfile.TemporaryDirectory(prefix="training-import-") as scratch:
        if implements(workload, Workload.pack_dataset):
            return _import_packed(options, workload.name, workload, Path(scratch)), None
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
            try:
                source = ImportSource(Path(options.source), Path(scratch)).files()
                if not imports_data(workload):
                    class_names(source)
            except UserError as error:
                more = how_without_import(workload, Path(options.source))
                raise UserError(f"{error}{more}") from error
            act, what, total = workload.import_dataset, f"{len(source)} files", len(source)
        checked_folder(options.out)
        with _whole_folder(options.out):
            with ProgressBar(f"importing {what}", total) as bar:
                made = act(
                    source, options.out, options.seed, lambda done, total: bar.show(done, "", total)
                )
            meta = {name: value for name, value in made.items() if name != "report"}
            report = made.get("report")
            manifest = _finish_making(options.out, workload.name, meta, began)
    if store is not None:
        _send(options.out, store)
    return manifest, report


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
        _send(options.out, open_store(options.dataset_uri))
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


def _send(folder: Path, store: Store) -> int:
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


def show_next(
    given: str, workload: "Workload[Any]", manifest: Mapping[str, Any], where: str, uri: str | None
) -> dict[str, Any]:
    """Print what follows for the dataset in `where`, for the workload as `given`; return it."""
    meta, recipes = manifest["meta"], list(workload.recipes)
    print(f"[data] {facts_of(meta)}")
    small, large = recipes[0], "full" if "full" in recipes else recipes[0]
    tried = {recipe: _tried(workload, recipe, meta) for recipe in dict.fromkeys((small, large))}
    here, on_ec2, refused = list[str](), list[str](), "; also: ".join(tried[large]["refused"])
    is_stored = where.startswith("s3://")
    if not is_stored and not tried[small]["refused"]:
        words = ["--workload", given, "--recipe", small]
        words += [w for pair in _pairs(tried[small]) for w in ("--override", pair)]
        words += ["--dataset-uri", where, "--run-uri", "runs/first"]
        here = [f"python -m training run {shlex.join(words)}"]
        print("here:", *here, sep="\n    ")
    if not refused:
        on_ec2, refused = _deploy(given, large, _pairs(tried[large]), manifest, where, uri)
    return {
        "dataset": where,
        "meta": meta,
        "recipes": tried,
        "here": here,
        "on_ec2": on_ec2,
        "on_ec2_refused": refused,
    }


def _tried(workload: "Workload[Any]", recipe: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a recipe takes from the dataset, what else it needs and why it is refused."""
    needed, without, refused = workable(workload, recipe, meta)
    found = fitted(workload, recipe, needed, meta)
    named = " ".join(f"{name}={text}" for name, text in found.items())
    print(f"[data] recipe {recipe}, overrides from the dataset: {named or 'none'}")
    if without:
        named = " ".join(f"{name}={text}" for name, text in needed.items())
        fits = f" ({named} lets it train)" if not refused else ""
        print(f"[warning] recipe {recipe} would be refused: {'; also: '.join(without)}{fits}")
    return {"from_dataset": found, "needed": needed, "refused": refused}


def _pairs(tried: Mapping[str, Any]) -> list[str]:
    return [f"{name}={text}" for name, text in tried["needed"].items()]


def _deploy(
    given: str,
    recipe: str,
    overrides: Sequence[str],
    manifest: Mapping[str, Any],
    where: str,
    uri: str | None,
) -> tuple[list[str], str]:
    """Print and return the commands of an upload and a deploy, or why there are none."""
    context = {"workload": given, "recipe": recipe, "overrides": " ".join(overrides)}
    if given not in WORKLOADS:
        module = module_of(given)
        file = Path(str(sys.modules[module].__file__)).resolve()
        context["source"] = str(file.parents[module.count(".") + (file.stem == "__init__")])
    figures, advised = _advised(given, recipe, overrides, manifest)
    is_stored = (uri or where).startswith("s3://")
    key = (uri or where).removeprefix("s3://").partition("/")[2].strip("/")
    if not is_stored:
        # A folder may have any name, a key prefix may not.
        key = re.sub(r"[^\w.-]+", "-", Path(where).resolve().name, flags=re.ASCII).strip("-._")
        key = key or "dataset"
    context = {name: text for name, text in context.items() if text} | advised | {"dataset": key}
    if refused := _refused(context):
        print(f"[warning] recipe {recipe} would not deploy: {refused}")
        return [], refused
    here = Path.cwd() == _ROOT
    folder = where if here or where.startswith("s3://") else str(Path(where).resolve())
    commands = [] if here else [f"cd {shlex.quote(str(_ROOT))}"]
    if not is_stored:
        store = f"s3://DATASET-BUCKET/{key}"
        commands.append(
            f"python -m training data upload {shlex.quote(folder)} --dataset-uri {store}"
        )
    if not where.startswith("s3://"):
        context["dataset_manifest"] = f"{folder}/{MANIFEST}"
    pairs = " ".join(f"-c {shlex.quote(f'{name}={text}')}" for name, text in context.items())
    commands.append(f"npx cdk deploy TrainingStack {pairs}")
    print(f"on EC2{figures}:", *commands, sep="\n    ")
    return commands, ""


def _advised(
    workload: str, recipe: str, overrides: Sequence[str], manifest: Mapping[str, Any]
) -> tuple[str, dict[str, str]]:
    """Return the figures of the size that sizing picks, and its CDK context; "" if unknown."""
    gib = math.ceil(sum(e["bytes"] for e in manifest["files"]) * _VOLUME_PER_DATASET / 2**30)
    context = {"data_volume.gib": str(gib)} if gib > _USUAL_GIB else {}
    words = [workload, "--recipe", recipe, "--volume-gib", str(max(gib, _USUAL_GIB)), "--json"]
    options = {"global_batch": "--batch", "micro_batch": "--micro-batch"}
    for name, _, text in (pair.partition("=") for pair in overrides):
        words += [options[name], text] if name in options else []
    words += ["--manifest", "/dev/stdin"]
    done = _run("sizing", "advise", *words, given=json.dumps(manifest))
    if done.returncode != 0:
        return "", context
    advice = json.loads(done.stdout)
    found = next((each for each in advice["candidates"] if each["size"] == advice["take"]), None)
    if found is None or found["why_not"]:
        return "", context
    if found["market"] == "on-demand":
        context["on_demand_base"] = "1"
    hours, spot, demand = (found[n] for n in ("hours_p50", "usd_p50", "usd_on_demand"))
    return (
        f", {advice['take']}: {hours:.2g} h, ${spot:.2f} on Spot, ${demand:.2f} on demand "
        "(p50, modelled)",
        {"size": advice["take"], **context},
    )


def _refused(context: Mapping[str, str]) -> str:
    """Return why a deploy would be refused; "" if it would not, or where nothing can say so."""
    if context.get("source") == str(_ROOT):
        return f"the module of {context['workload']} is in {_ROOT}; move it to a folder of its own"
    pairs = [word for name, text in context.items() for word in ("-c", f"{name}={text}")]
    done = _run("stacks.parameters", *pairs)
    # As it says itself what is wrong; anything else is about this environment.
    return done.stderr.strip().removeprefix("parameters: ") if done.returncode == 2 else ""


def _run(module: str, *words: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(
        command, cwd=_ROOT, input=given, capture_output=True, text=True, check=False
    )
