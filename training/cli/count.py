"""`python -m training count`: what a step of any model needs, counted like a workload's.

`python -m sizing model` starts it and prices what it counts.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from training.errors import EXIT_FINISHED, UserError
from training.preflight.transformer import Shape, shape_of

_DEFAULT_TOKENS = 512


def add_count(parser: argparse.ArgumentParser) -> None:
    """Add the options of `count`."""
    parser.add_argument(
        "target",
        metavar="MODEL",
        help="package.module:function, which returns (model, batch) or (model, batch, loss); "
        "or a transformer's config.json",
    )
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, all GPUs together")
    parser.add_argument("--micro-batch", type=int, help="samples at once on a GPU (default: all)")
    parser.add_argument("--samples", type=int, help="of an epoch (default: 1,000 steps)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16"
    )
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument(
        "--tokens", type=int, help=f"of a sample, for config.json (default: {_DEFAULT_TOKENS})"
    )
    parser.add_argument("--recipe", default="full", help="name of these settings in FILE")
    parser.add_argument("--out", type=Path, help="write the footprints to this file")
    parser.set_defaults(act=_count)


def _count(options: argparse.Namespace) -> int:
    # What is wrong with a config is said before torch is imported.
    shape = _read_shape(options) if options.target.endswith(".json") else None
    if shape is None and options.tokens is not None:
        raise UserError("--tokens is for a config.json: the function makes its own batch")
    from training.cli.measure import train_footprints, write_footprints
    from training.preflight.standalone import ModelStage, load_function
    from training.workload import Settings, Train

    micro_batch = options.micro_batch or options.batch
    try:
        settings = Settings(
            epochs=options.epochs,
            global_batch=options.batch,
            micro_batch=micro_batch,
            eval_batch=micro_batch,
            precision=options.precision,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    make = load_function(options.target) if shape is None else _maker(shape, options.tokens)
    stage = ModelStage(options.target, make, settings, options.optimizer)
    samples = {"train": options.samples or 1000 * options.batch, "validation": 0}
    about = {"workload": options.target, "recipe": options.recipe}
    # Counting calls no more of a stage than this one has.
    rows = list(train_footprints(cast(Train, stage), SimpleNamespace(seed=0), samples, about))
    rows = [{**row, "stage": "model", "loss": stage.loss_is} for row in rows]
    if options.out:
        write_footprints(options.out, rows, command="python -m training count")
    print(json.dumps(rows, indent=1))
    return EXIT_FINISHED


def _read_shape(options: argparse.Namespace) -> Shape:
    """The shape in a config.json; a file that describes none is the user's mistake."""
    path = Path(options.target)
    try:
        shape = shape_of(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"there is no {path}; give a transformer's config.json") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from None
    if shape.patch and options.tokens:
        raise UserError("--tokens is for text: an image's number of patches is in its config")
    if shape.positions and not shape.patch and (options.tokens or 0) > shape.positions:
        raise UserError(f"--tokens is {options.tokens}; this model has {shape.positions} positions")
    return shape


def _maker(shape: Shape, tokens: int | None) -> Callable[[int], tuple[Any, ...]]:
    """A function that makes the transformer with a batch of a size, and its loss."""
    import torch
    import torch.nn.functional as F

    from training.preflight.transformer import Transformer

    length = tokens or min(_DEFAULT_TOKENS, shape.positions or _DEFAULT_TOKENS)

    def loss(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        scores = model(inputs).flatten(0, -2)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))

    def make(size: int) -> tuple[Any, ...]:
        if shape.patch:
            batch = torch.zeros(size, shape.channels, shape.image, shape.image)
        else:
            batch = torch.zeros(size, length, dtype=torch.long)
        return Transformer(shape), batch, loss

    return make
