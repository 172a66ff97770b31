"""Compares a run with the uninterrupted one, a workload's or a program's; checks its store."""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from contract.keys import CHECKPOINTS, FINAL, checkpoint_prefix
from contract.lineage import Line, generation_of, newest_by_step
from contract.samples import lineage_problems
from training.durable.program.progress import LOSSES
from training.durable.record.head import Head, read_head
from training.durable.record.history import metrics_reader
from training.durable.save.weights import weights_sha256
from training.durable.store.protocol import Store
from training.durable.store.transfer import receive


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """A finished run, with each step and evaluation once: the newest generation's."""

    head: Head
    steps: Mapping[int, Mapping[str, Any]]
    evaluations: Mapping[int, Mapping[str, Any]]
    num_steps_done: int  # including repeated ones
    num_steps_gained: int  # steps after a notice that were not repeated
    passed_over: tuple[str, ...]
    tensors: Mapping[str, Tensor]


def read_outcome(store: Store, scratch: Path) -> RunOutcome:
    """Read a finished run from its store."""
    head = read_head(store)
    assert head is not None
    lines = list(metrics_reader(store).new())
    scratch.mkdir(parents=True, exist_ok=True)
    tensors = {}
    if store.sizes(FINAL.partition("/")[0] + "/").get(FINAL):
        path = scratch / f"final-{secrets.token_hex(4)}.safetensors"
        store.get_file(FINAL, path)
        tensors = load_file(path)
        path.unlink()
    steps = newest_by_step(lines, "step")
    return RunOutcome(
        head=head,
        steps=steps,
        evaluations=newest_by_step(lines, "evaluation"),
        num_steps_done=sum(line["kind"] == "step" for line in lines),
        num_steps_gained=_num_gained(lines, steps),
        passed_over=tuple(
            entry["name"]
            for line in lines
            if line["kind"] == "resume"
            for entry in line["passed_over"]
        ),
        tensors=tensors,
    )


def differences(ours: RunOutcome, reference: RunOutcome) -> list[str]:
    """Differences from the uninterrupted run: the first step, evaluation and tensor that differ."""
    found = [
        *_first_step(ours, reference),
        *_first_evaluation(ours, reference),
        *lineage_problems(ours.steps),
    ]
    for name in sorted(ours.tensors.keys() | reference.tensors.keys()):
        if name not in ours.tensors or name not in reference.tensors:
            found.append(f"tensor {name!r} is only in one of the runs")
            break
        a, b = ours.tensors[name], reference.tensors[name]
        if a.dtype != b.dtype or not torch.equal(a, b):
            most = "" if a.shape != b.shape else f" by up to {_most(a, b):.3g}"
            found.append(f"the first tensor that differs is {name!r}{most}")
            break
    for what, outcome in (("the torture's", ours), ("the uninterrupted", reference)):
        if weights_sha256(outcome.tensors) != outcome.head.weights_sha256:
            found.append(f"{what} run's final weights are not those that its head names")
    return found


def broken_promises(store: Store, known: dict[str, bool]) -> list[str]:
    """Violations of what must hold after every attempt: all files that the head names are intact.

    `known` caches which keys are intact.
    """
    head = read_head(store)
    if head is None:
        return []
    sizes = store.sizes(CHECKPOINTS)
    broken = []
    for entry in head.checkpoints:
        for file in entry.files:
            key = checkpoint_prefix(entry.name) + file.name
            if sizes.get(key) != file.bytes:
                broken.append(f"the head names {key} of {file.bytes} bytes; found {sizes.get(key)}")
            elif key not in known:
                known[key] = receive(store, key, file, lambda start, block: None)
                if not known[key]:
                    broken.append(f"the head names {key}, which does not match its SHA-256")
    return broken


def _num_gained(lines: list[dict[str, Any]], steps: Mapping[int, Mapping[str, Any]]) -> int:
    """Number of steps made after the boundary where their generation noticed its notice."""
    noticed = {line["generation"]: line["step"] for line in lines if line["kind"] == "notice"}
    return sum(step > noticed.get(line["generation"], step) for step, line in steps.items())


def _first_step(ours: RunOutcome, reference: RunOutcome) -> list[str]:
    for step in sorted(ours.steps.keys() | reference.steps.keys()):
        if step not in ours.steps or step not in reference.steps:
            return [f"step {step} is only in one of the runs"]
        for field in ("stage", "epoch", "ids_sum", "ids_crc", "lr", "loss", "metrics"):
            a, b = ours.steps[step].get(field), reference.steps[step].get(field)
            if a != b:
                stage = reference.steps[step]["stage"]
                return [f"step {step} (stage {stage!r}): {field} is {a} instead of {b}"]
    return []


def _first_evaluation(ours: RunOutcome, reference: RunOutcome) -> list[str]:
    for step in sorted(ours.evaluations.keys() | reference.evaluations.keys()):
        a, b = ours.evaluations.get(step, {}), reference.evaluations.get(step, {})
        if (a.get("stage"), a.get("metrics")) != (b.get("stage"), b.get("metrics")):
            return [
                f"evaluation after step {step}: {a.get('metrics')} instead of {b.get('metrics')}"
            ]
    return []


def _most(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRun:
    """A finished run of the program: its losses by step, its files, its interruptions."""

    losses: Mapping[int, float]
    files: Mapping[str, str]  # final/ name -> sha256
    interruptions: Sequence[Mapping[str, Any]]
    seconds: float
    num_snapshots: int
    snapshot_seconds: float | None = None  # until the first taken while the program ran


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two runs differ."""

    steps: tuple[int, ...]  # whose losses differ; without files, also the end of the longer run
    missing: tuple[int, ...]  # with a loss in one run only: a machine may die before it reports one
    largest: float  # of the losses' differences
    files: tuple[str, ...]

    @property
    def is_none(self) -> bool:
        """Whether the runs are equal bit for bit, as far as the program shows."""
        return not self.steps and not self.files


def losses_by_step(lines: Iterable[Line]) -> dict[int, float]:
    """Return each step's loss, as first reported by the newest attempt that did the step."""
    losses: dict[int, float] = {}
    generations: dict[int, int] = {}
    told = [line for line in lines if line["kind"] == "metrics" and line["at"] is not None]
    for line in sorted(told, key=generation_of):
        name = next((name for name in LOSSES if name in line["values"]), None)
        if name is not None and generations.get(line["at"]) != generation_of(line):
            generations[line["at"]] = generation_of(line)
            value = line["values"][name]
            losses[line["at"]] = math.nan if value is None else value
    return dict(sorted(losses.items()))


def difference(ours: ProgramRun, theirs: ProgramRun) -> Difference:
    """Compare losses step by step, NaN equal to NaN, and final files by checksum."""
    steps, largest = [], 0.0
    for step in sorted(ours.losses.keys() & theirs.losses.keys()):
        a, b = ours.losses[step], theirs.losses[step]
        if a != b and not (math.isnan(a) and math.isnan(b)):
            steps.append(step)
            if math.isfinite(a - b):
                largest = max(largest, abs(a - b))
    missing = tuple(sorted(ours.losses.keys() ^ theirs.losses.keys()))
    ends = {max(run.losses, default=0) for run in (ours, theirs)}
    if len(ends) > 1 and not ours.files:  # then nothing else shows the end
        steps.append(max(ends))
    names = sorted(ours.files.keys() | theirs.files.keys())
    files = tuple(name for name in names if ours.files.get(name) != theirs.files.get(name))
    return Difference(steps=tuple(steps), missing=missing, largest=largest, files=files)
