"""Footprints made up by formula, in the format of `python -m training measure`."""

import json
from pathlib import Path
from typing import Any

MIB = 2**20


def row(stage: str, micro_batch: int, **changes: Any) -> dict[str, Any]:
    """One Train footprint: 100 MiB of parameters, and 10 MiB of activations a sample."""
    parameters = changes.pop("parameter_bytes", 100 * MIB)
    activations = changes.pop("activations_each", 10 * MIB) * micro_batch
    return {
        "workload": "trajectory",
        "recipe": "full",
        "stage": stage,
        "kind": "train",
        "micro_batch": micro_batch,
        "recipe_micro_batch": 16,
        "global_batch": 64,
        "precision": "bfloat16",
        "samples_per_epoch": 8000,
        "epochs": 10,
        "steps_per_epoch": 125,
        "evaluations": 10,
        "validation_samples": 2000,
        "eval_batch": 64,
        "parameters": parameters // 4,
        "trainable_parameters": parameters // 4,
        "parameter_bytes": parameters,
        "buffer_bytes": 0,
        "gradient_bytes": parameters,
        "optimizer_bytes": 2 * parameters,
        "peak_bytes": 4 * parameters + activations,
        "peak_phase": "backward",
        "peak_gradient_bytes": parameters,
        "peak_activation_bytes": activations,
        "kept_bytes": 7 * MIB + activations,
        "kernels": 324,
        "output_bytes": 0,
        "checkpoint_bytes": 3 * parameters,
        "flops_per_sample": 20_000_000_000,
        **changes,
    }


def write(path: Path, **changes: Any) -> Path:
    """A file with one Train stage at four micro-batches."""
    rows = [row("head", size, **changes) for size in (8, 16, 32, 64)]
    content = {"format": 2, "torch": "2.14.1", "command": "made up", "footprints": rows}
    path.write_text(json.dumps(content))
    return path
