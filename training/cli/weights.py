"""`python -m training export | evaluate | predict`: use the weights of a run."""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from contract.errors import Exit, UserError
from contract.keys import SPLITS
from training.cli.run import RUN_URI, checked_file, checked_folder
from training.durable import (
    FileProgressBar,
    OpenRun,
    StoredDataset,
    UnfinishedFile,
    export_snapshot,
    open_store,
)
from training.registry import name_known

if TYPE_CHECKING:
    from torch import nn

    from training.durable import Weights
    from training.engine.evaluation import TrainedStage
    from training.workload import Config, Train

_CHECKPOINT = "newest, best, a step, or the start of a name (default: a finished run's weights)"


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    parser.description = (
        "Write the weights of a finished run, or of one checkpoint of any run, to a safetensors "
        "file with workload, recipe, config, stage, step and metrics in its metadata. For a "
        "program's run, write a snapshot of its checkpoint folder, the newest by default."
    )
    add = parser.add_argument
    add("--run-uri", required=True, help=RUN_URI)
    add("--checkpoint", help=_CHECKPOINT)
    add("--out", required=True, type=Path, help="the file to write; for a snapshot a new folder")
    add(
        "--format",
        help="another library's: torchvision, timm, torch.export or huggingface, if the workload "
        "has it, or dcp (torch.distributed.checkpoint)",
    )
    add(
        "--dataset-uri",
        help="the run's dataset: its classes and preprocessing, or its tokenizer, go along",
    )
    add("--json", action="store_true", help="print the metadata as JSON")
    parser.set_defaults(act=_export)


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add the options of `evaluate`."""
    parser.description = "Print the metrics of a run's weights on a split of a dataset."
    _add_subject(parser)
    parser.add_argument("--out", type=Path, help="folder for the evaluation's files and pictures")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    parser.set_defaults(act=_evaluate)


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the options of `predict`."""
    parser.description = (
        "Write a run's predictions, one JSON line per sample of a split, or for a detector one "
        "list in COCO's results format. With --images: what a detector or classifier finds in your "
        "own, as pictures. With --prompt: how a language model continues a text."
    )
    _add_subject(parser)
    add = parser.add_argument
    add(
        "--images",
        type=Path,
        help="your own image or folder of images, instead of a split: what is found goes to the "
        "folder --out; the dataset names the classes",
    )
    add("--prompt", action="append", help="a text to continue, instead of a split; repeatable")
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="of drawn tokens; 0, the default, takes the likeliest",
    )
    add("--seed", type=int, default=0, help="of drawn tokens (default: 0)")
    add("--tokens", type=int, default=0, help="at most so many (default: the recipe's)")
    add("--out", type=Path, help="the file to write (default: standard output)")
    parser.set_defaults(act=_predict)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run-uri", required=True, help=RUN_URI)
    add("--checkpoint", help=_CHECKPOINT)
    add("--dataset-uri", required=True, help="a folder, or s3://bucket/prefix")
    add("--split", default="validation", choices=SPLITS, help="default: %(default)s")
    add("--stage", help="default: the Train stage that the weights come from")
    add("--scratch", type=Path, help="local folder (default: a temporary one)")


def _export(options: argparse.Namespace) -> int:
    if options.format is not None:
        return _export_to(options)
    if not options.run_uri.endswith(".safetensors"):
        run = OpenRun.at(options.run_uri)
        if run.is_of_program:
            return _export_snapshot(run, options)
    from safetensors.torch import save_file

    from training.durable import Weights

    checked_file(options.out)
    weights = Weights.read(options.run_uri, options.checkpoint)
    along: Mapping[str, bytes] = {}
    if options.dataset_uri is not None:
        along = _companions(_stage_of(options.run_uri, weights)[0], options.dataset_uri)
    with UnfinishedFile(options.out) as unfinished:
        save_file(dict(weights.tensors), unfinished.path, metadata=dict(weights.about))
        unfinished.place()
    _write_along(along, options.out)
    if options.json:
        print(json.dumps(weights.about, indent=1))
    else:
        size = options.out.stat().st_size / 1e6
        print(f"[ok] {options.out}: {len(weights.tensors)} tensors, {size:.1f} MB")
        print(f"weights {weights.sha256}")
    return Exit.FINISHED


def _export_to(options: argparse.Namespace) -> int:
    """Write the model for another library."""
    from training.durable import Weights
    from training.numerics import seed_torch
    from training.preflight.standalone import standalone_inputs

    if options.out.exists():
        raise UserError(f"{options.out} exists; use a new file or folder")
    checked_folder(options.out.parent)
    weights = Weights.read(options.run_uri, options.checkpoint)
    stage, config = _stage_of(options.run_uri, weights)
    inputs = standalone_inputs(stage.name, config)  # no data is read
    seed_torch(inputs.device, "model", inputs.seed, stage.name)
    model = stage.model(inputs)
    weights.load_into(model, stage.name)
    formats = {**stage.formats(), "dcp": _write_dcp}
    if options.format not in formats:
        raise UserError(
            f"stage {stage.name!r} has no format {options.format!r}; "
            f"{name_known(options.format, sorted(formats))}"
        )
    along = {} if options.dataset_uri is None else _companions(stage, options.dataset_uri)
    formats[options.format](model.eval(), options.out)
    _write_along(along, options.out)
    print(f"[ok] {options.out}: {options.format}, {len(model.state_dict())} tensors")
    return Exit.FINISHED


def _companions(stage: "Train", uri: str) -> Mapping[str, bytes]:
    """Return the files that go along; UserError for a dataset that the stage would refuse."""
    store = open_store(uri)
    meta = json.loads(StoredDataset(store).require())["meta"]
    if refused := stage.refusals(meta):
        raise UserError(
            f"{store.uri} is not what stage {stage.name!r} was trained on: {refused[0]}"
        )

    def read(name: str) -> bytes:
        found = store.get(name)
        if found is None:
            raise UserError(f"{store.uri} has no {name}; sync it again")
        return found.data

    found = {"classes.json": json.dumps(meta["classes"]).encode()} if "classes" in meta else {}
    return {**found, **stage.companions(meta, read)}


def _write_along(files: Mapping[str, bytes], out: Path) -> None:
    """Write them into a folder, or next to a file under its name."""
    for name, content in files.items():
        (out / name if out.is_dir() else out.with_name(f"{out.name}.{name}")).write_bytes(content)


def _stage_of(uri: str, weights: "Weights") -> "tuple[Train, Config]":
    """Return the stage that a run's weights belong to, and the run's config."""
    from training.engine.job import ResolvedWorkload
    from training.workload import Train

    run = OpenRun.of_workload(uri)
    resolved = ResolvedWorkload.of_run(run.record)
    name = weights.about.get("stage") or run.head.checkpoints[-1].stage
    stage = next(s for s in resolved.stages if isinstance(s, Train) and s.name == name)
    return stage, resolved.config


def _write_dcp(model: "nn.Module", out: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        # It warns that only one process saves, which is intended.
        warnings.simplefilter("ignore", UserWarning)
        save({"model": model.state_dict()}, checkpoint_id=out, no_dist=True)


def _export_snapshot(run: OpenRun, options: argparse.Namespace) -> int:
    entry = run.find_checkpoint(options.checkpoint or "newest")
    if not options.out.exists():
        checked_folder(options.out)
    snapshot = export_snapshot(run.store, entry, options.out)
    if options.json:
        print(json.dumps({"snapshot": entry.name, "files": list(snapshot.paths)}, indent=1))
    else:
        size = snapshot.num_bytes / 1e6
        print(f"[ok] {options.out}: {len(snapshot.files)} files, {size:.1f} MB of {entry.name}")
    return Exit.FINISHED


def _evaluate(options: argparse.Namespace) -> int:
    if options.out is not None:
        checked_folder(options.out)
    with _trained(options) as trained, redirect_stdout(sys.stderr):
        out = options.out or trained.inputs.scratch / "evaluation"
        metrics = trained.evaluate(options.split, out)
        stage = trained.stage.name
    if options.json:
        print(json.dumps({"stage": stage, "split": options.split, "metrics": metrics}, indent=1))
        return Exit.FINISHED
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:{width}} {value:.6g}")
    files = f", files in {options.out}" if options.out else ""
    print(f"[ok] stage {stage}, split {options.split}{files}")
    return Exit.FINISHED


def _predict(options: argparse.Namespace) -> int:
    stdout = sys.stdout
    if options.images is not None:
        return _draw(options)
    asked = {
        "--temperature": (options.temperature, 0),
        "--tokens": (options.tokens, 0),
        "--seed": (options.seed, -(2**63)),
    }
    for name, (given, least) in asked.items():
        if not least <= given < 2**63:
            raise UserError(f"{name} is {given}; give 0 or more")
    write = _write_texts if options.prompt else _write_predictions
    if options.out is not None:
        checked_file(options.out)
    with _trained(options) as trained, redirect_stdout(sys.stderr):
        if options.out is None:
            write(trained, options, stdout)
            return Exit.FINISHED
        with UnfinishedFile(options.out) as unfinished:
            with unfinished.path.open("w") as stream:
                num = write(trained, options, stream)
            unfinished.place()
    print(f"[ok] {options.out}: {num} predictions")
    return Exit.FINISHED


def _draw(options: argparse.Namespace) -> int:
    """Draw on the user's own images."""
    import torch

    from training.workload import Train, implements

    given = options.images
    images = [given] if given.is_file() else sorted(p for p in given.glob("*") if p.is_file())
    images = [path for path in images if not path.name.startswith(".")]
    if not images:
        raise UserError(f"{given} has no files; pass an image or a folder of images")
    if options.out is None:
        raise UserError("--images needs --out, the folder for the pictures; add it")
    checked_folder(options.out)
    with _trained(options) as trained, torch.no_grad():
        if not implements(trained.stage, Train.draw):
            raise UserError(
                f"stage {trained.stage.name!r} cannot draw on images; leave --images out"
            )
        trained.stage.draw(trained.model, trained.inputs, images, options.out)
    print(f"[ok] {options.out}: what was found in {len(images)} images")
    return Exit.FINISHED


def _write_texts(trained: "TrainedStage", options: argparse.Namespace, stream: TextIO) -> int:
    """Continue the user's own texts, one JSON line each."""
    from training.workload import Train, implements

    stage, prompts = trained.stage, options.prompt
    if not implements(stage, Train.continued):
        raise UserError(f"stage {stage.name!r} cannot continue a text; leave --prompt out")
    how = (options.tokens, options.temperature, options.seed)
    texts = stage.continued(trained.model, trained.inputs, prompts, how)
    for prompt, text in zip(prompts, texts, strict=True):
        stream.write(json.dumps({"prompt": prompt, "text": text}) + "\n")
    return len(texts)


def _write_predictions(trained: "TrainedStage", options: argparse.Namespace, stream: TextIO) -> int:
    from training.workload import Train, implements

    stage, num = trained.stage, 0
    if not implements(stage, Train.predict):
        raise UserError(
            f"stage {stage.name!r} cannot predict: it has no `predict(model, batch)`, which "
            "returns a dictionary for each sample; add it (training/workload.py)"
        )
    between, is_list = "[", implements(stage, Train.result_list)
    classes = trained.inputs.dataset.meta.get("classes")
    for micro, batch in trained.each_batch(options.split):
        predictions = stage.predict(trained.model, batch)
        if len(predictions) != len(micro.ids):
            raise UserError(
                f"stage {stage.name!r}: `predict` returned {len(predictions)} predictions for "
                f"{len(micro.ids)} samples; return one for each, in order"
            )
        num += len(predictions)
        for index, prediction in zip(micro.ids, predictions, strict=True):
            if not is_list:
                names = _named(prediction, classes) if isinstance(classes, list) else {}
                stream.write(json.dumps({"index": index, **prediction, **names}) + "\n")
                continue
            for result in stage.result_list(prediction):
                stream.write(f"{between}\n{json.dumps(result)}")
                between = ","
    if is_list:
        stream.write("[]\n" if between == "[" else "\n]\n")
    return num


def _named(prediction: Mapping[str, Any], classes: Sequence[Any]) -> dict[str, Any]:
    """Return the names of a classifier's numbers, `label` and `classes`, as far as it has them."""
    names: dict[str, Any] = {}
    if isinstance(label := prediction.get("label"), int):
        names["label_name"] = classes[label]
    if isinstance(found := prediction.get("classes"), list):
        names["names"] = [classes[number] for number in found]
    return names


@contextmanager
def _trained(options: argparse.Namespace) -> "Iterator[TrainedStage]":
    """Yield the stage that the options name; progress goes to stderr, so results can be piped."""
    from training.durable import Weights
    from training.engine.evaluation import load_trained
    from training.engine.job import ResolvedWorkload

    run = OpenRun.of_workload(options.run_uri)
    with tempfile.TemporaryDirectory(prefix="training-") as temporary:
        scratch = checked_folder(options.scratch or Path(temporary))
        with redirect_stdout(sys.stderr):
            resolved = ResolvedWorkload.of_run(run.record)
            with FileProgressBar("dataset") as show:
                dataset = StoredDataset(open_store(options.dataset_uri)).fetched(scratch, show)
            if dataset.fingerprint != run.record.dataset:
                print(
                    f"[warning] {options.dataset_uri} is not the dataset that the run was trained "
                    "on: its classes, if it has any, must be the same ones in the same order"
                )
            weights = Weights.read(options.run_uri, options.checkpoint)
            # Final weights of older runs do not name their stage: it is the last Train stage.
            stage = options.stage or weights.about.get("stage") or run.head.checkpoints[-1].stage
            trained = load_trained(run, resolved, weights, dataset, scratch, stage)
        yield trained
