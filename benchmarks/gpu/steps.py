"""Seconds and memory of real steps, next to the predictions of `sizing` for this GPU.

Ours are the recipes' own stages. Others are architectures of the transformers library with random
weights, trained as its users train them: autocast, pure bfloat16, recomputation, peft adapters.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.gpu.session import Session
from sizing import Constants, Footprint, Gpu, counted_stages, gpu_memory, gpus, step_time
from training import ResolvedWorkload, Train, configure, load_workload, train_steps

_WARM_STEPS, _STEPS = 3, 10
_MIB = 2**20
_MODELS = Path(__file__).with_name("models")
# Workload, recipe, and whether it must be deterministic.
_RECIPES = (
    ("imagenet", "full", False),
    ("detection", "full", False),
    ("detection", "full", True),
    ("growth", "full", False),
    ("trajectory", "full", False),
    ("trajectory", "magvit_full", False),
    ("trajectory", "magvit_b", False),
)
# Configs in models/, each with options of `python -m training count`.
_FINE_TUNING: Mapping[str, tuple[str, str]] = {
    "Llama 1B, autocast": ("llama-1b", "--batch=4 --tokens=1024"),
    "Llama 1B, pure bfloat16": ("llama-1b", "--batch=4 --tokens=1024 --pure"),
    "Llama 1B, recomputed": ("llama-1b", "--batch=4 --tokens=1024 --recompute"),
    "Llama 1B, eager attention": ("llama-1b", "--batch=4 --tokens=1024 --attention=eager"),
    "Llama 1B, LoRA": ("llama-1b", "--batch=4 --tokens=1024 --lora=16"),
    "Qwen3 8B, LoRA, recomputed": ("qwen3-8b", "--batch=4 --tokens=1024 --lora=16 --recompute"),
    "BERT large, autocast": ("bert-large", "--batch=32 --tokens=512"),
}
_DRY: Mapping[str, tuple[str, str]] = {
    "tiny": ("tiny", "--batch=2 --tokens=16"),
    "tiny, LoRA, recomputed": ("tiny", "--batch=2 --tokens=16 --lora=2 --recompute"),
}


def steps(session: Session) -> None:
    """Compare predicted with measured seconds and MiB of each recipe's stages, then fine-tuning."""
    gpu = _gpu(session)
    recipes = (("growth", "laptop", True),) if session.is_dry else _RECIPES
    for workload, recipe, deterministic in recipes:
        for stage in counted_stages(workload, recipe):
            if stage.kind == "train":
                name = f"{workload} {recipe}, {stage.stage}{', deterministic' * deterministic}"
                about = {"workload": workload, "recipe": recipe, "stage": stage.stage}
                given = {"deterministic": str(deterministic).lower()}
                _compare(session, gpu, name, stage, about | given)
    chosen = _DRY if session.is_dry else _FINE_TUNING
    cases = [(name, _MODELS / f"{config}.json", more) for name, (config, more) in chosen.items()]
    with ThreadPoolExecutor() as pool:  # counting takes one core each, and no GPU
        all_counted = list(pool.map(lambda case: _count(session, *case), cases))
    for (name, config, options), counted in zip(cases, all_counted, strict=True):
        if isinstance(counted, str):
            session.row(name, "skipped", counted)
        else:
            _compare(session, gpu, name, counted, {"config": str(config), "options": options})


def _gpu(session: Session) -> Gpu:
    """Return the catalogue's row for this GPU; in a dry run, any."""
    if session.is_dry:
        return gpus()["NVIDIA A10G"]
    name = torch.cuda.get_device_name()
    found = [gpu for gpu in gpus().values() if name.startswith(gpu.name)]
    if not found:
        raise ValueError(f"sizing/catalogue/gpus.csv does not have {name}")
    return max(found, key=lambda gpu: len(gpu.name))


def _count(session: Session, name: str, config: Path, options: str) -> Footprint | str:
    """Count a config as `sizing model` does, or return why that failed."""
    stem = session.folder / name.replace(" ", "-").replace(",", "")
    out, log = stem.with_suffix(".counted.json"), stem.with_suffix(".log")
    code = session.training(["count", str(config), *options.split(), f"--out={out}"], log)
    if code != 0:
        return log.read_text()[-200:].strip()
    return counted_stages(str(config), "full", path=out)[0]


def _compare(
    session: Session, gpu: Gpu, name: str, counted: Footprint, about: Mapping[str, str]
) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.steps"]
    try:
        found = session.ask(name.replace(" ", "-"), command, input=json.dumps(about))
    except RuntimeError as error:
        is_lacking = "ModuleNotFoundError" in str(error)
        session.row(f"{name}: s", "skipped" if is_lacking else "FAILED", str(error))
        return
    step, seconds = step_time(counted, gpu, Constants()), found["seconds"]
    low, high = step.seconds_low, step.seconds_high
    within = "within" if low <= seconds <= high else "OUTSIDE"
    verdict = f"{step.seconds / seconds:.2f} x, {within} {low:.4f} to {high:.4f}, {step.bound_by}"
    session.row(f"{name}: s predicted, measured", f"{step.seconds:.4f}, {seconds:.4f}", verdict)
    if found["peak_bytes"]:
        predicted = gpu_memory(counted, Constants()).allocated
        peak = found["peak_bytes"] / _MIB
        what = f"{name}: MiB predicted, measured"
        session.row(what, f"{predicted:.0f}, {peak:.0f}", f"{predicted / peak - 1:+.0%}")


def main() -> int:
    """Time the steps of the request on standard input; print their median and the peak."""
    about = json.load(sys.stdin)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = _steps_of_stage if "stage" in about else _steps_of_library
    seconds = list(_clocked(made(about, device), device))[_WARM_STEPS:]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    print(json.dumps({"seconds": median(seconds), "peak_bytes": peak}))
    return 0


def _clocked(done: Iterator[object], device: torch.device) -> Iterator[float]:
    """Yield each step's seconds, including the GPU's; the first includes creating the model."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    began = time.perf_counter()
    for _ in islice(done, _WARM_STEPS + _STEPS):
        wait()
        yield time.perf_counter() - began
        began = time.perf_counter()


def _steps_of_stage(about: Mapping[str, str], device: torch.device) -> Iterator[object]:
    workload = load_workload(about["workload"])
    given = {"deterministic": about["deterministic"]}
    resolved = ResolvedWorkload.of(workload, about["recipe"], given)
    config = resolved.config
    configure(num_threads=config.num_threads, deterministic=config.deterministic)
    stage = next(each for each in resolved.stages if each.name == about["stage"])
    assert isinstance(stage, Train)
    settings = stage.settings
    num_micro = -(-settings.global_batch // settings.micro_batch)
    example = tree_map_only(Tensor, _random_like, stage.example(settings.micro_batch))
    return train_steps(stage, config, example, device, num_micro)


def _random_like(tensor: Tensor) -> Tensor:
    """Randomize pixels, features and boxes, as a GPU is faster on zeros; keep labels and tokens."""
    if tensor.is_floating_point():
        return torch.rand_like(tensor)
    return torch.randint_like(tensor, 256) if tensor.dtype == torch.uint8 else tensor


def _steps_of_library(about: Mapping[str, str], device: torch.device) -> Iterator[object]:
    """Train as the library's users do, without this project's code."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    options = dict(part.lstrip("-").partition("=")[::2] for part in about["options"].split())
    config = AutoConfig.from_pretrained(about["config"])
    config.use_cache = False
    config._attn_implementation = options.get("attention") or "sdpa"
    kind = AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM
    halved = "pure" in options or "lora" in options
    with device:
        torch.set_default_dtype(torch.bfloat16 if halved else torch.float32)
        model: Any = kind.from_config(config)
        torch.set_default_dtype(torch.float32)
    if "lora" in options:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=int(options["lora"]), target_modules="all-linear")
        )
    if "recompute" in options:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    size = (int(options["batch"]), int(options["tokens"]))
    tokens = torch.randint(0, config.vocab_size, size, device=device)
    while True:
        with torch.autocast(device.type, torch.bfloat16, enabled="pure" not in options):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


if __name__ == "__main__":
    sys.exit(main())
