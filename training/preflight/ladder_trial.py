"""One trial of the ladder, in a new process: real steps of every stage on the largest batch.

Called by training/preflight/ladder.py with JSON on standard input; prints one JSON line.
"""

import gc
import json
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from training.config import resolve_config
from training.engine.numerics import configure
from training.engine.optimizer_state import step_in_backward
from training.engine.precision import Scaling, autocast
from training.engine.reduction import sums_set_aside
from training.preflight.ladder import apply_rungs
from training.preflight.limits import is_out_of_memory, limit_memory
from training.preflight.standalone import LAST_STEP, standalone_inputs
from training.registry import load_workload
from training.workload import Train, implements

# Without a GPU the limit also covers the run's thread stacks and buffers.
_HOST_MIB = 128
_NUM_STEPS = 2  # the second one has the optimizer's state


def main() -> int:
    """Run the trial and print its outcome."""
    request = json.load(sys.stdin)
    workload = load_workload(request["workload"])
    plain = resolve_config(workload, request["recipe"], request["overrides"])
    config = apply_rungs(workload, plain, request["rungs"])
    before = apply_rungs(workload, plain, request["rungs"][:-1])
    device = configure(num_threads=config.num_threads, deterministic=config.deterministic)
    refusal = _refusal(workload.stages(before), workload.stages(config), before)
    if refusal:
        return _print("refused", refusal, None)
    limit = request["memory_limit_mib"]
    if limit is not None:
        limit_memory(limit if device.type == "cuda" else max(1, limit - _HOST_MIB), device)
    for stage in workload.stages(config):
        if isinstance(stage, Train) and implements(stage, Train.example):
            try:
                _steps(stage, config, device)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return _print("out of memory", f"in stage {stage.name!r}", None)
            gc.collect()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return _print("fits", "", peak)


def _refusal(before: Any, after: Any, config: Any) -> str:
    """Why the last rung must not be applied; empty if it may."""
    for old, new in zip(before, after, strict=True):
        if not isinstance(old, Train):
            continue
        try:
            if old.settings.micro_batch == new.settings.micro_batch:
                continue
        except ValueError as error:
            return f"(stage {new.name!r}: {error})"
        model = new.model(standalone_inputs(new.name, config))
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            return f"(stage {new.name!r} has BatchNorm, which computes with its micro-batch)"
    return ""


def _steps(stage: Train, config: Any, device: torch.device) -> None:
    settings = stage.settings
    example = stage.example(settings.micro_batch)
    weight = stage.weight(example)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    model = stage.model(standalone_inputs(stage.name, config)).to(device).train()
    average = [p.detach().clone() for p in model.parameters() if settings.ema_decay is not None]
    optimizer = stage.optimizer(model)
    if settings.optimizer_in_backward:
        step_in_backward(optimizer)
    scaling = Scaling(settings.precision, device)
    num_micro = 2 if settings.global_batch > settings.micro_batch else 1
    num_of_step = math.ceil(settings.global_batch / settings.micro_batch)
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad(set_to_none=True)
        aside: list[Tensor] = []
        for number in range(num_micro):
            if number == num_micro - 1:
                # What waits to be added, while the last micro-batch is computed.
                aside = sums_set_aside(model, num_of_step)
            with autocast(settings.precision, device):
                loss = stage.loss(model, batch, *LAST_STEP)
                total = loss.total / weight + (0.0 if loss.mean is None else loss.mean)
            scaling.backward(total)
        aside.clear()
        if not settings.optimizer_in_backward:
            scaling.step(optimizer, model, settings.clip_norm)
    optimizer.zero_grad(set_to_none=True)
    _evaluate(stage, model, device)
    del average


def _evaluate(stage: Train, model: nn.Module, device: torch.device) -> None:
    example = stage.example(stage.settings.eval_batch)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    with torch.no_grad(), autocast(stage.settings.precision, device):
        stage.loss(model.eval(), batch, *LAST_STEP)


def _print(outcome: str, message: str, peak_bytes: int | None) -> int:
    print(json.dumps({"outcome": outcome, "message": message, "peak_bytes": peak_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
