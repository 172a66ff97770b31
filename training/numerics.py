"""The numerics key: all that changes the bits of a result besides the seed, code included.

Random state is never stored: it is derived from the seed and the position in the run.
"""

import hashlib
import inspect
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

import training

# The folders of training/ whose code affects the weights.
ENGINE = ("artifacts", "durable/attempt", "durable/save", "engine", "workloads/expansion")

_LARGE_BYTES = 31 * 2**20  # glibc learns from blocks of up to 32 MiB


def configure(*, num_threads: int, deterministic: bool, local_rank: int = 0) -> torch.device:
    """Set threads and determinism before any work; return this process's device."""
    torch.set_num_threads(num_threads)
    # Its end lets glibc keep up to twice as much of what is freed (mallopt(3), M_MMAP_THRESHOLD),
    # which each step would otherwise return, and the kernel clear again: 1 of 3 ms of a small step.
    torch.empty(_LARGE_BYTES, dtype=torch.uint8)
    _spare_compiler()
    # use_deterministic_algorithms would import it, to set what the environment below does; if it is
    # there already, that is set here.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        inductor.deterministic = deterministic
    # Filling would make reads of uninitialized memory repeatable, at the price of writing all
    # memory twice. `check` and `torture` find such reads: two equal runs would differ.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic:
        # cuBLAS reads it with its first handle; without it, torch refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Otherwise Inductor chooses kernels by timing them.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.backends.cudnn.benchmark = False
    device = device_of(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _spare_compiler() -> None:
    """Keep torch's optimizers from importing its compiler only to tell it not to trace them.

    That is 1.2 CPU seconds and 850 files of each start.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = inspect.unwrap(getattr(Optimizer, name))
        # Where torch/_compile.py keeps what to call, which it asks the compiler for otherwise.
        setattr(method, "__dynamo_disable", method)
    for kind in Optimizer.__subclasses__():
        step: Any = vars(kind).get("step")
        if getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad":
            kind.step = _sparing(step)  # type: ignore[method-assign]


def _sparing(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return what torch's decorator of steps does, which imports the compiler, without it."""
    plain = inspect.unwrap(step)

    @wraps(step)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return call


def device_of(local_rank: int) -> torch.device:
    """Return the GPU of a local rank, or the CPU, without initializing it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def numerics_key(
    device: torch.device,
    *,
    world: int | None,
    deterministic: bool,
    stages: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the key as JSON, without the code; with it, equal keys mean equal bits.

    On a GPU, they do if `deterministic` is true.

    `world` is the number of ranks, or None where no sum depends on it.
    """
    key: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "deterministic": deterministic,
        "stages": {name: dict(values) for name, values in stages.items()},
        "float32": _float32_precision(device),
    }
    if world is not None:
        key["world"] = world
    if device.type == "cuda":
        key |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "gpu": torch.cuda.get_device_name(device),
            "driver": _driver_version(),
        }
    else:
        key |= {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    return key


def _float32_precision(device: torch.device) -> dict[str, str]:
    """Return the precision that float32 is computed in, such as TF32; "none" is torch's choice.

    Reads the names that torch has from 2.9 on, which also reflect the older `allow_tf32`; reading
    the older one warns, or fails where the newer names were used.
    """
    backends: Any = torch.backends
    layers = backends.cudnn if device.type == "cuda" else backends.mkldnn
    products = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    return {
        "matmul": products.fp32_precision,
        "convolution": layers.conv.fp32_precision,
        "recurrent": layers.rnn.fp32_precision,
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.splitlines()[0].strip() if result.stdout else "unknown"


@cache
def code_fingerprint(module: str, *engine: str) -> str:
    """Hash the code of a workload or stage defined in `module`, and what it may use of training/.

    Covers its own package or module, and the modules directly in training/ and training/durable/: a
    workload imports nothing else. `engine` adds folders of training/ that affect its results.
    """
    digest = hashlib.sha256()
    for path in _sources(module, engine):
        # Not the full path: another machine may have the same code elsewhere.
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(module: str, engine: tuple[str, ...]) -> list[Path]:
    home = _root(training.__name__)
    top, *below = module.split(".")
    depth = 2 if below[:1] == ["workloads"] else 1
    own = home.joinpath(*below[:depth]) if top == training.__name__ else _root(top)
    ground = [*sorted(home.glob("*.py")), *sorted(home.glob("durable/*.py"))]
    used = [source for part in engine for source in _sources_in(home / part)]
    return list(dict.fromkeys([*ground, *used, *_sources_in(own)]))


def _sources_in(path: Path) -> list[Path]:
    assert path.exists(), f"{path} was moved: nothing of it would be in the fingerprint"
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _root(module: str) -> Path:
    """Return the folder of a package (even without __init__.py), or the file of a module."""
    spec = sys.modules[module].__spec__
    assert spec is not None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    assert spec.origin is not None
    return Path(spec.origin)


def derive_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on every part and their order."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def derive_seeds(*parts: int | str) -> Callable[[int], int]:
    """Return `derive_seed(*parts, number)` as a function of the number, at a third of the cost.

    Called once per sample, which matters where a step takes milliseconds.
    """
    prefix = hashlib.blake2b("".join(f"{part}\x1f" for part in parts).encode(), digest_size=8)

    def derive(number: int) -> int:
        digest = prefix.copy()
        digest.update(b"%d" % number)
        return int.from_bytes(digest.digest(), "little") >> 1

    return derive


def shuffled(length: int, epoch: int, seed: int) -> Tensor:
    """Return 0 .. length-1 in an order that is a function of (seed, epoch) alone.

    A tensor takes 8 bytes a sample, a list 40.
    """
    generator = torch.Generator()
    generator.manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(length, generator=generator)


def seed_torch(device: torch.device, *parts: int | str) -> None:
    """Seed the generators that a stage's code draws from: torch's, numpy's and `random`'s.

    Avoids torch.manual_seed, which formats the entire Python stack at every call where CUDA is not
    in use: 79 microseconds here, 143 from deeper stacks, against 2.6 (training/LOG.md). numpy's and
    `random`'s take some 20 more.
    """
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def drawing_from(rng: torch.Generator) -> Iterator[None]:
    """Make code that draws from the generators of torch (CPU), numpy and `random` use `rng`.

    For example torchvision's transforms in `Samples.get`. The generators are restored afterwards.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=rng))
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
