"""Price any model without a workload: its step is counted on fake tensors, like a workload's.

package.module:function returns (model, batch) or (model, batch, loss); its argument, if it takes
one, is the batch size. Any architecture of the transformers library can be built, from a
CONFIG.json or by its name on the Hugging Face Hub, from which only the config is read. Without
--size every size is ranked.

python -m sizing model my.module:detector --batch 16 --samples 118287 --epochs 12
python -m sizing model my.module:detector --steps 1000 --size g5.2xlarge --keep detector.json
python -m sizing advise my.module:detector --footprints detector.json
python -m sizing model config.json --tokens 1024 --batch 8 --steps 1000
python -m sizing model Qwen/Qwen3-8B --lora 16 --four-bit --recompute --optimizer adamw-8bit
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from sizing.cli.advise_command import DEFAULT_SIZE, candidate_row, show_candidates, sizes
from sizing.cli.plan_command import show_plan
from sizing.cli.shared_options import (
    COUNT,
    FLAG,
    Options,
    add_options,
    add_request_arguments,
    planner,
    request,
)
from sizing.cli.tables import print_json
from sizing.models.footprints import FOOTPRINTS_FILE
from sizing.plan.advice import best, rank
from sizing.plan.checks import check_plan
from sizing.plan.report import plan_json

HELP = "any model, or a transformer's config.json: counted, then priced"
NAME = {"metavar": "NAME"}
# How it is trained: options of `python -m training count`.
_TRAINED: Options = {
    "--precision": (NAME, "float32, bfloat16 or float16 (default: bfloat16)"),
    "--pure": (FLAG, "parameters, gradients and state in bfloat16, too"),
    "--optimizer": (NAME, "adamw, sgd or adamw-8bit (default: adamw)"),
    "--lora": (COUNT, "train adapters of this rank; half precision freezes the rest in it"),
    "--four-bit": (FLAG, "with --lora: the frozen matrices in four bits (QLoRA)"),
    "--tokens": (COUNT, "sample length for transformers (default: 512 or all positions)"),
    "--attention": (NAME, "for transformers: eager, or sdpa (default: fused)"),
    "--recompute": (
        FLAG,
        "for transformers: activation checkpointing, recomputing each block in backward",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("workload", metavar="MODEL", help="package.module:function, CONFIG.json or a Hub's name")
    add("--size", help="instance type, such as g5.2xlarge (default: rank all)")
    add("--sizes", help="rank these, separated by commas, or a family")
    add("--steps", type=int, help="replaces --samples and --epochs")
    add_options(parser, _TRAINED)
    add("--keep", type=Path, metavar="FILE", help="save the counts to FILE")
    add_request_arguments(parser)
    add("--explain", action="store_true", help="with --size: also show every figure's basis")


def run(arguments: argparse.Namespace) -> int:
    """Count, then print the plan or the ranking."""
    if arguments.footprints != FOOTPRINTS_FILE:
        raise ValueError("--footprints is for plan and advise: this command counts again")
    _set_length(arguments)
    with TemporaryDirectory() as folder:
        arguments.recipe = "full"
        arguments.footprints = arguments.keep or Path(folder) / "footprints.json"
        _check(arguments)
        count(arguments)
        return _print(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be planned before counting, which takes minutes for a large model."""
    asked = request(arguments, arguments.size or DEFAULT_SIZE)
    if arguments.size:
        asked.find_instance()
    elif arguments.sizes:
        sizes(arguments.sizes)


def _set_length(arguments: argparse.Namespace) -> None:
    """Turn --steps into samples and epochs; without any of them, a thousand steps."""
    for name in ("steps", "batch", "gpus"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; use at least 1")
    arguments.batch = arguments.batch or 8
    given = (arguments.samples, arguments.epochs)
    if arguments.steps is not None and given != (None, None):
        raise ValueError("--steps contradicts --samples and --epochs; use one of the two")
    if arguments.samples is None and arguments.epochs is not None:
        raise ValueError("--epochs needs --samples: how many samples an epoch has")
    if arguments.samples is None:
        arguments.samples = (arguments.steps or 1000) * arguments.batch
        arguments.epochs = 1.0


def count(arguments: argparse.Namespace) -> None:
    """Have the trainer count the model; its refusal becomes a ValueError with its message."""
    target = arguments.workload
    per_gpu = max(1, arguments.batch // arguments.gpus)
    asked = {
        "--batch": arguments.batch,
        "--micro-batch": arguments.micro_batch or per_gpu,
        "--samples": arguments.samples,
        "--out": arguments.footprints,
    }
    options = [text for name, value in asked.items() for text in (name, str(value))]
    for name in _TRAINED:
        value = getattr(arguments, name.removeprefix("--").replace("-", "_"))
        if value not in (None, False):
            options += [name] if value is True else [name, str(value)]
    if not arguments.json:
        print(f"counting {target} on fake tensors ...", file=sys.stderr)
    # Another process, because only the trainer knows torch.
    command = [sys.executable, "-m", "training", "count", target, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"{target} was not counted: {lines[-1].removeprefix('error: ')}")


def _print(arguments: argparse.Namespace) -> int:
    plan = planner(arguments)
    if arguments.size:
        made = plan(request(arguments, arguments.size))
        findings = check_plan(made)
        if arguments.json:
            print_json("model", {"plan": plan_json(made, findings)})
        else:
            show_plan(made, findings, explain=arguments.explain)
        return 1 if findings.problems else 0
    names = sizes(arguments.sizes) if arguments.sizes else None
    found = rank(request(arguments, DEFAULT_SIZE), plan=plan, sizes=names)
    cheapest = best(found)
    if arguments.json:
        rows = {"candidates": [candidate_row(each) for each in found]}
        print_json("model", {"take": cheapest.plan.request.size, **rows})
        return 0
    show_candidates(
        found, title=f"{arguments.workload}: sizes, cheapest first, p50 to p90 on Spot (modelled)"
    )
    show_plan(cheapest.plan, cheapest.findings)
    return 0
