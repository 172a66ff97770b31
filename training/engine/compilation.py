"""torch.compile for a stage's blocks. What it makes stays on this machine, in torch's own cache."""

from functools import partial
from typing import Any

import torch
from torch import nn

from training.engine.parallel import named_blocks
from training.workload import Train


def compile_blocks(stage: Train, model: nn.Module, mode: str) -> None:
    """Let torch compile each block that the stage names, or the whole model; equals share code."""
    # Not dynamic: whether torch compiles code for all sizes depends on what this process compiled
    # before, so the bits could differ after an interruption. They also could if the ninth size of
    # a batch ran uncompiled, as it does by default.
    from torch._dynamo import config

    config.recompile_limit = config.accumulated_recompile_limit
    for block in named_blocks(stage, model) or [model]:
        # Like block.compile(), but through a function of ours: before torch 2.14 a module of one of
        # torch's own classes, such as nn.Sequential, silently stayed uncompiled.
        block._compiled_call_impl = torch.compile(partial(_call, block), mode=mode, dynamic=False)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
