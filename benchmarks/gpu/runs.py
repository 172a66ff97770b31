"""The machine, and measurements on runs of the trainer: equality, the cost of determinism etc."""

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from benchmarks.gpu.session import Session, last_line, override_options, rate_of
from contract.errors import Exit

# The least time of a comparison, and how many share the GPU, as they are not timed.
_LEAST_SECONDS = 30.0
_AT_ONCE = 4
# The torture's workload: everything risky in two Train stages and a Prepare stage, tiny layers.
_SMALL = "training.proof.torture.small_workload:SMALL"
_TRAJECTORY = {"num_threads": 1, "time_average_epochs": 1, "num_shards": 2}

Overrides = Mapping[str, object]


def machine(session: Session) -> None:
    """Describe the machine and the software."""
    if session.is_dry:
        session.row("GPU, driver, memory", "none: a dry run on the CPU")
    else:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
        done = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        session.row("GPU, driver, memory", done.stdout.strip())
    versions = (platform.python_version(), torch.__version__, torch.version.cuda, os.cpu_count())
    session.row("Python, torch, CUDA, vCPUs", ", ".join(map(str, versions)))


def equality(session: Session) -> None:
    """Compare weights and losses of plain, repeated and often interrupted runs, bit for bit."""
    compared = _compared(session)
    with ThreadPoolExecutor(1 if session.is_dry else _AT_ONCE) as pool:
        for done in as_completed(pool.submit(_equal, session, n, *c) for n, c in compared.items()):
            session.row(*done.result())


def _equal(
    session: Session, name: str, workload: str, recipe: str, overrides: Overrides
) -> tuple[str, str, str]:
    if session.seconds_left < _LEAST_SECONDS:
        return name, "skipped", "no time left"
    log = session.folder / f"check-{name.replace(' ', '-')}.log"
    code = session.training(
        ["check", workload, f"--recipe={recipe}", *override_options(overrides)], log
    )
    found: dict[int | None, str] = {Exit.FINISHED: "equal bits"}
    # Python exits with the same code if a package is missing.
    if code == Exit.FAILED and "[failed]" in log.read_text(errors="replace"):
        found[code] = "DIFFERS"
    detail = last_line(log)
    is_lacking = detail.startswith("ModuleNotFoundError")
    return name, "skipped" if is_lacking else found.get(code, f"FAILED: {code}"), detail


def _compared(session: Session) -> dict[str, tuple[str, str, Overrides]]:
    """Return the comparisons by name: workload, recipe and overrides."""

    def growth(**overrides: object) -> tuple[str, str, Overrides]:
        given = {"precision": "bfloat16", "deterministic": True, **overrides}
        return "growth", "laptop", session.growth(**given)

    def trajectory(recipe: str, **overrides: object) -> tuple[str, str, Overrides]:
        return "trajectory", recipe, {**_TRAJECTORY, "deterministic": True, **overrides}

    first: dict[str, tuple[str, str, Overrides]] = {"bfloat16, average": (_SMALL, "bfloat16", {})}
    if session.is_dry:
        return first
    # Their images need Pillow.
    images: dict[str, tuple[str, str, Overrides]] = {
        "convolutions, channels last": ("imagenet", "laptop", {"precision": "bfloat16"}),
        "detector": ("detection", "laptop", {"precision": "bfloat16"}),
    }
    return (
        images
        | first
        | {
            "float16, accumulated": (_SMALL, "float16", {}),
            "fused": growth(fused_optimizer=True),
            "fused, moments in bfloat16": growth(fused_optimizer=True, lean_optimizer="all"),
            "compiled": growth(compile_mode="default"),
            "not deterministic": growth(deterministic=False),
            "magvit_laptop in bfloat16": trajectory("magvit_laptop", precision="bfloat16"),
            "magvit_full": trajectory("magvit_full"),
            "laptop": trajectory("laptop"),
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rated:
    """A recipe whose samples per second are measured by stage: unchanged, then with variants."""

    workload: str
    recipe: str
    count: int  # samples in the dataset
    overrides: Overrides
    stages: tuple[str, ...]
    variants: Mapping[str, Overrides]


def speed(session: Session) -> None:
    """Measure samples per second with one setting changed at a time."""
    for rated in _rated(session):
        dataset = session.dataset(rated.workload, rated.count)
        rates: dict[str, float] = {}
        for variant, own in {"as it is": {}, **rated.variants}.items():
            name = f"{rated.recipe}-{variant.replace(' ', '-')}"
            log = session.folder / f"{name}.log"
            given = session.run_options(name, rated.workload, rated.recipe, dataset)
            given += override_options({**rated.overrides, **own})
            code = session.training([*given, "--no-adapt"], log)
            if code != 0:
                raise RuntimeError(f"{name}: exit code {code}, {last_line(log)}")
            for stage in rated.stages:
                rate, waited = rate_of(session.folder, name, stage)
                ratio = rate / rates.setdefault(stage, rate)
                what = f"{ratio:.2f} x as it is, {waited:.0%} waiting for data"
                session.row(f"{rated.recipe}, {stage}, {variant}: samples/s", f"{rate:.0f}", what)


def _rated(session: Session) -> Iterator[_Rated]:
    exact: Mapping[str, Overrides] = {"deterministic": {"deterministic": True}}
    more: Mapping[str, Overrides] = {
        "fused optimizer": {"fused_optimizer": True},
        "moments in bfloat16": {"fused_optimizer": True, "lean_optimizer": "all"},
        "2 loader workers": {"loader_workers": 2},
        "compiled": {"compile_mode": "default"},
    }
    yield _Rated(
        workload="growth",
        recipe="laptop",
        count=2000,
        overrides=session.growth(dense_steps=10 if session.is_dry else 60, deterministic=False),
        stages=("dense",),
        variants=exact if session.is_dry else {**exact, **more},
    )
    if session.is_dry:
        return
    yield _Rated(
        workload="trajectory",
        recipe="full",
        count=2000,
        overrides={"epochs": 3, "weights": "random"},
        stages=("head",),
        # Kernel launches are most of its step.
        variants={**exact, "CUDA graphs": {"compile_mode": "reduce-overhead"}},
    )
    yield _Rated(
        workload="trajectory",
        recipe="magvit_full",
        count=2000,
        overrides={"tokenizer_epochs": 1, "epochs": 2},
        stages=("tokenizer", "transformer"),
        variants=exact,
    )
