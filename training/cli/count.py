"""`python -m training count`: what a step of any model needs, counted like a workload's.

`python -m sizing model` starts it and prices what it counts.
"""

import argparse
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from training.cli.run import positive_int
from training.durable.errors import EXIT_FINISHED, UserError


def add_count(parser: argparse.ArgumentParser) -> None:
    """Add the options of `count`."""
    add = parser.add_argument
    add(
        "target",
        metavar="MODEL",
        help="package.module:function, which returns (model, batch) or (model, batch, loss); or a "
        "config.json that the transformers library builds, or its name on the Hugging Face Hub",
    )
    add("--batch", type=int, default=8, help="samples of a step, all GPUs together")
    add("--micro-batch", type=positive_int, help="samples at once on a GPU (default: all)")
    add("--samples", type=positive_int, help="samples of an epoch (default: those of 1,000 steps)")
    add("--epochs", type=int, default=1)
    add("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    add("--pure", action="store_true", help="parameters and state in bfloat16, too")
    add("--optimizer", choices=("adamw", "sgd", "adamw-8bit"), default="adamw")
    add(
        "--lora",
        type=positive_int,
        metavar="RANK",
        help="train only adapters; the rest is frozen, in --precision",
    )
    add("--four-bit", action="store_true", help="with --lora: frozen matrices in 4 bits (QLoRA)")
    add("--tokens", type=positive_int, help="tokens per sample, for transformers (default: 512)")
    add("--attention", choices=("sdpa", "eager"), help="for transformers (default: fused)")
    add("--recompute", action="store_true", help="for transformers: recompute blocks in backward")
    add("--recipe", default="full", help="name of these settings in the file of --out")
    add("--out", type=Path, help="write the footprints to this file")
    parser.set_defaults(act=_count)


def _count(options: argparse.Namespace) -> int:
    _check(options)
    from training.cli.measure import check_out, train_footprints, write_footprints
    from training.preflight.standalone import ModelStage
    from training.workload import Settings, Train

    if options.out:
        check_out(options.out)
    micro_batch = options.micro_batch or options.batch
    try:
        settings = Settings(
            epochs=options.epochs,
            global_batch=options.batch,
            micro_batch=micro_batch,
            eval_batch=micro_batch,
            # Without autocast, what is already in bfloat16 is computed in it.
            precision="float32" if options.pure else options.precision,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    samples = {"train": options.samples or 1000 * options.batch, "validation": 0}
    about = {"workload": options.target, "recipe": options.recipe}
    make, counting = _maker(options)
    with counting:
        stage = ModelStage(options.target, make, settings, options.optimizer)
        # Counting calls only those methods of a stage that this one has.
        rows = list(train_footprints(cast(Train, stage), SimpleNamespace(seed=0), samples, about))
    rows = [{**row, "stage": "model", "loss": stage.loss_is} for row in rows]
    for row in rows:
        row["precision"] = options.precision
        if options.lora:  # adapters and their state are what is saved
            row["checkpoint_bytes"] = row["gradient_bytes"] + row["optimizer_bytes"]
    if options.out:
        write_footprints(options.out, rows, command="python -m training count")
    print(json.dumps(rows, indent=1))
    return EXIT_FINISHED


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before torch is imported."""
    if ":" in options.target and (options.tokens or options.recompute):
        raise UserError("--tokens and --recompute are for transformers: the function decides here")
    if options.pure and options.precision != "bfloat16":
        raise UserError(f"--pure is bfloat16, not {options.precision}")
    if options.four_bit and not options.lora:
        raise UserError("--four-bit freezes the model: add --lora RANK")
    if options.lora and options.pure:
        raise UserError("--lora already freezes the model in that precision: leave out --pure")


def _maker(
    options: argparse.Namespace,
) -> tuple[Callable[[int], tuple[Any, ...]], AbstractContextManager[None]]:
    """Return a function that makes model and batch for a batch size, and a context to count in."""
    import torch

    from training.preflight.borrowed import (
        HuggingFace,
        adapted,
        balanced_experts,
        in_bfloat16,
    )
    from training.preflight.standalone import load_function

    # torch would print a traceback before our one sentence.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    counting: AbstractContextManager[None] = nullcontext()
    make: Callable[[int], tuple[Any, ...]]
    if ":" in options.target:
        make = load_function(options.target)
    else:
        make = HuggingFace(
            options.target,
            tokens=options.tokens,
            attention=options.attention,
            recomputes=options.recompute,
        )
        counting = balanced_experts()
    if options.lora:
        dtype = getattr(torch, options.precision)
        make = adapted(make, rank=options.lora, dtype=dtype, four_bit=options.four_bit)
    return (in_bfloat16(make) if options.pure else make), counting
