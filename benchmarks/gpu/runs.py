"""Measured on runs of the trainer: equality, the price of determinism, the ladder."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.gpu.language import LanguageConfig, TrainLanguage
from benchmarks.gpu.session import (
    LANGUAGE,
    Session,
    TrainerRun,
    last_line,
    override_options,
    rate_of,
)
from training.errors import EXIT_FAILED, EXIT_FINISHED
from training.preflight.standalone import standalone_inputs
from training.settings import changed

# What a comparison takes at least.
_LEAST_SECONDS = 30.0
_TRAJECTORY = {"num_threads": 1, "time_average_epochs": 1, "num_shards": 2}


def equality(session: Session) -> None:
    """Alone, again, and interrupted everywhere: weights and losses, bit for bit."""
    for name, (workload, recipe, overrides) in _compared(session).items():
        if session.seconds_left < _LEAST_SECONDS:
            session.row(name, "skipped", "no time is left")
            continue
        log = session.folder / "check.log"
        given = [f"--recipe={recipe}", *override_options(overrides)]
        code = session.training(["check", workload, *given], log)
        found: dict[int | None, str] = {EXIT_FINISHED: "equal bits", EXIT_FAILED: "DIFFERS"}
        session.row(name, found.get(code, f"FAILED: {code}"), last_line(log))


def _compared(session: Session) -> dict[str, tuple[str, str, Mapping[str, object]]]:
    """What is compared, by name: workload, recipe and overrides."""

    def language(**overrides: object) -> tuple[str, str, Mapping[str, object]]:
        return LANGUAGE, "plain", session.language(**{"deterministic": True, **overrides})

    def trajectory(recipe: str, **overrides: object) -> tuple[str, str, Mapping[str, object]]:
        return "trajectory", recipe, {**_TRAJECTORY, "deterministic": True, **overrides}

    first = {"bfloat16, average, fused": language(ema=True, fused=True)}
    if session.is_dry:
        return first
    return first | {
        "float16, accumulated": language(precision="float16", micro_batch=16),
        "compiled": language(compile_mode="default"),
        "not deterministic": language(deterministic=False),
        "magvit_laptop in bfloat16": trajectory("magvit_laptop", precision="bfloat16"),
        "magvit_full": trajectory("magvit_full"),
        "laptop": trajectory("laptop"),
    }


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
