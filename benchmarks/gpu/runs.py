"""Measured on runs of the trainer: equality, the price of determinism, the ladder, `check`."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.language import LanguageConfig, TrainLanguage
from benchmarks.gpu.session import (
    LANGUAGE,
    Session,
    TrainerRun,
    end_of,
    last_line,
    rate_of,
    start_training,
    steps_of,
)
from training.errors import EXIT_INTERRUPTED
from training.preflight.standalone import standalone_inputs
from training.proof.compare import differences, read_outcome
from training.settings import changed
from training.store.open import open_store

# Runs at the same time share a GPU, three of each comparison: each gets this much, or a quarter.
_SHARE_MIB = 6000
_MOST_AT_ONCE = 4
# What a comparison takes at least.
_LEAST_SECONDS = 30.0
_POLL_SECONDS = 0.02
_TRAJECTORY = {"num_threads": 1, "time_average_epochs": 1, "num_shards": 2}


def equality(session: Session) -> None:
    """Alone, again, and interrupted by a notice and resumed: weights and losses, bit for bit."""
    none = session.dataset(LANGUAGE, 1)

    def language(**overrides: object) -> TrainerRun:
        given = {"steps": 24, "deterministic": True, **overrides}
        return TrainerRun(
            workload=LANGUAGE, recipe="plain", dataset=none, overrides=session.language(**given)
        )

    half = {"micro_batch": 4 if session.is_dry else 16}
    jobs = {"bfloat16, average, fused": (language(ema=True, fused=True), "language", 9)}
    if not session.is_dry:
        jobs |= {
            "float16, accumulated": (language(precision="float16", **half), "language", 9),
            "compiled": (language(compile_mode="default"), "language", 9),
            "not deterministic": (language(deterministic=False), "language", 9),
            **_trajectory_jobs(session),
        }
    at_once = 1 if session.is_dry else session.gpu_mib // (3 * _share_mib(session))
    with ThreadPoolExecutor(max(1, min(at_once, _MOST_AT_ONCE))) as pool:
        tasks = [pool.submit(_compare, session, name, *job) for name, job in jobs.items()]
    for task in tasks:
        task.result()


def _trajectory_jobs(session: Session) -> dict[str, tuple[TrainerRun, str, int]]:
    """Real recipes, made shorter: what is run, and the stage and step of the notice."""
    clips = session.dataset("trajectory", 220)

    def job(recipe: str, **overrides: object) -> TrainerRun:
        return TrainerRun(
            workload="trajectory",
            recipe=recipe,
            dataset=clips,
            overrides={**_TRAJECTORY, "deterministic": True, **overrides},
        )

    short = {"tokenizer_epochs": 1, "epochs": 2}
    heads = {"single_frame_epochs": 1, "shuffled_epochs": 1, "epochs": 3}
    return {
        "magvit_laptop in bfloat16": (
            job("magvit_laptop", precision="bfloat16", **short),
            "transformer",
            8,
        ),
        "magvit_full": (job("magvit_full", **short), "tokenizer", 20),
        "laptop": (job("laptop", **heads), "head", 12),
    }


def _compare(session: Session, name: str, job: TrainerRun, stage: str, step: int) -> None:
    if session.seconds_left < _LEAST_SECONDS:
        session.row(name, "skipped", "no time is left")
        return
    slug = "".join(letter if letter.isalnum() else "-" for letter in name)
    with ThreadPoolExecutor(3) as pool:
        alone, again = (pool.submit(_whole, session, job, f"{slug}-{k}") for k in ("a", "b"))
        cut = pool.submit(_interrupted, session, job, f"{slug}-cut", stage, step)
    first_code, code = cut.result()
    codes = {"a": alone.result(), "b": again.result(), "cut": code}
    bad = [k for k, code in codes.items() if code != 0]
    if bad:
        log = session.folder / f"{slug}-{bad[0]}.log"
        session.row(name, f"exit codes {list(codes.values())}", f"FAILED: {last_line(log)}")
        return
    was = "" if first_code == EXIT_INTERRUPTED else f" (no notice: exit code {first_code})"
    for k, what in (("b", "run again"), ("cut", f"interrupted and resumed{was}")):
        session.row(f"{name}: {what}", *_difference(session.folder, f"{slug}-a", f"{slug}-{k}"))


def _difference(folder: Path, one: str, other: str) -> tuple[str, str]:
    """Whether two runs are equal, and if not where they first differ."""
    ours, theirs = (read_outcome(open_store(str(folder / name)), folder) for name in (other, one))
    found = differences(ours, theirs)
    return ("DIFFERS", found[0]) if found else ("equal bits", f"{len(theirs.steps)} steps")


def _share_mib(session: Session) -> int:
    return min(_SHARE_MIB, session.gpu_mib // 4)


def _options(session: Session) -> list[str]:
    limit = [] if session.is_dry else [f"--memory-limit-mib={_share_mib(session)}"]
    return ["--no-adapt", *limit]


def _whole(session: Session, job: TrainerRun, name: str) -> int | None:
    arguments = job.arguments(session.folder, name, *_options(session))
    return session.training(arguments, session.folder / f"{name}.log")


def _interrupted(
    session: Session, job: TrainerRun, name: str, stage: str, step: int
) -> tuple[int | None, int | None]:
    """Send a notice at a step of a stage, then resume; both exit codes."""
    arguments = job.arguments(session.folder, name, *_options(session))
    with (session.folder / f"{name}.log").open("w") as log:
        process = start_training(arguments, log)
    while process.poll() is None and session.seconds_left > 0:
        if len(steps_of(session.folder, name, stage)) >= step:
            process.send_signal(signal.SIGUSR1)
            break
        time.sleep(_POLL_SECONDS)
    first = end_of(process, max(5.0, session.seconds_left))
    return first, session.training(arguments, session.folder / f"{name}.log")


def speed(session: Session) -> None:
    """Steps per second of the language model with one setting changed at a time, and bare."""
    none = session.dataset(LANGUAGE, 1)
    plain = session.language(steps=20) if session.is_dry else session.language()
    variants: dict[str, dict[str, object]] = {"plain": {}, "deterministic": {"deterministic": True}}
    if not session.is_dry:
        variants |= {
            "fused optimizer": {"fused": True},
            "2 loader workers": {"loader_workers": 2},
            "compiled": {"compile_mode": "default"},
        }
    base = float("nan")
    for name, own in variants.items():
        job = TrainerRun(
            workload=LANGUAGE, recipe="plain", dataset=none, overrides={**plain, **own}
        )
        rate, waited = _measured_rate(session, job, name.replace(" ", "-"), "language")
        base = rate if name == "plain" else base
        what = f"{rate / base:.2f} x plain, {waited:.0%} of it waiting for data"
        session.row(f"language, {name}: samples/s", f"{rate:.1f}", what)
    bare = _bare_rate(session, {**plain})
    session.row("language, bare loop: samples/s", f"{bare:.1f}", f"ours {base / bare:.2f} x bare")


def recipes(session: Session) -> None:
    """The full recipes as they are, then deterministic: the price of equal bits."""
    count = 66 if session.is_dry else 2000
    clips = session.dataset("trajectory", count)
    heads: dict[str, object] = {"weights": "random", "epochs": 3}
    heads |= {"single_frame_epochs": 1, "shuffled_epochs": 1}
    tokens: dict[str, object] = {"tokenizer_epochs": 1, "epochs": 2}
    todo = [("full", heads, ("time_average", "head"))]
    todo += [] if session.is_dry else [("magvit_full", tokens, ("tokenizer", "transformer"))]
    for recipe, short, stages in todo:
        rates: dict[str, float] = {}
        for deterministic in (False, True):
            overrides = {"time_average_epochs": 1, **short, "deterministic": deterministic}
            job = TrainerRun(
                workload="trajectory", recipe=recipe, dataset=clips, overrides=overrides
            )
            name = f"{recipe}-{deterministic}"
            _measured_rate(session, job, name, stages[0], f"--artifacts-uri={session.folder / 'a'}")
            for stage in stages:
                rate, waited = rate_of(session.folder, name, stage)
                before = rates.setdefault(stage, rate)
                what = f"{before / rate:.2f} x the time, {waited:.0%} waiting for data"
                kind = "deterministic" if deterministic else "as it is"
                session.row(f"{recipe}, {stage}, {kind}: clips/s", f"{rate:.0f}", what)


def _measured_rate(
    session: Session, job: TrainerRun, name: str, stage: str, *more: str
) -> tuple[float, float]:
    log = session.folder / f"{name}.log"
    arguments = job.arguments(session.folder, name, "--no-adapt", *more)
    code = session.training(arguments, log)
    if code != 0:
        raise RuntimeError(f"{name}: exit code {code}, {last_line(log)}")
    return rate_of(session.folder, name, stage)


def _bare_rate(session: Session, overrides: dict[str, object]) -> float:
    """Samples per second of the same steps in a bare loop, over one batch on the device."""
    fields = {name: value for name, value in overrides.items() if name != "steps"}
    stage = TrainLanguage(config=changed(LanguageConfig(), **fields))
    torch.set_num_threads(stage.config.num_threads)
    inputs = standalone_inputs(stage.name, stage.config)
    model = stage.model(inputs).to(session.device).train()
    optimizer, samples = stage.optimizer(model), stage.samples(inputs, "train")
    rng = torch.Generator().manual_seed(0)
    size = stage.settings.micro_batch
    batch = samples.collate([samples.get(k, 0, rng) for k in range(size)])
    batch = {name: tensor.to(session.device) for name, tensor in batch.items()}

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(session.device.type, torch.bfloat16):
                loss: Tensor = stage.loss(model, batch, 0, 1).total / stage.weight(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    steps(5)
    count = 5 if session.is_dry else 30
    return count * size / session.timed(lambda: steps(count))


def ladder(session: Session) -> None:
    """A batch that does not fit under a limit climbs to a rung that does."""
    limit = 300 if session.is_dry else 6000
    overrides: dict[str, object] = {"steps": 4, "global_batch": 128, "micro_batch": 128}
    if session.is_dry:
        small = {"width": 128, "num_layers": 2, "num_tokens": 64, "vocabulary": 1024}
        overrides |= {**small, "precision": "float32"}
    job = TrainerRun(
        workload=LANGUAGE,
        recipe="plain",
        dataset=session.dataset(LANGUAGE, 1),
        overrides=overrides,
    )
    log = session.folder / "ladder.log"
    arguments = job.arguments(session.folder, "ladder", f"--memory-limit-mib={limit}")
    code = session.training(arguments, log)
    path = session.folder / "ladder" / "adaptation.json"
    trials = json.loads(path.read_text())["trials"] if path.exists() else []
    said = "; ".join(f"{'+'.join(t['rungs']) or 'as it is'}: {t['outcome']}" for t in trials)
    name = f"batches of 128 under {limit} MiB"
    session.row(name, "finished" if code == 0 else f"FAILED: {code}", said or last_line(log))


def check(session: Session) -> None:
    """Whether `training check`, which forks its attempts, can do so with CUDA."""
    overrides = {"width": 64, "num_layers": 1, "num_tokens": 32, "vocabulary": 64, "steps": 12}
    given = [f"--override={name}={value}" for name, value in overrides.items()]
    log = session.folder / "check.log"
    code = session.training(["check", LANGUAGE, *given], log)
    session.row("training check", "finished" if code == 0 else f"FAILED: {code}", last_line(log))
