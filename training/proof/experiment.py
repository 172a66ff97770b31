"""Runs experiments from the parent: starts one or two attempts, signals them, waits.

Compares a run with the uninterrupted one, a workload's or a program's; checks its store.
"""

import math
import os
import secrets
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from contract.errors import UserError
from contract.keys import CHECKPOINTS, FINAL, checkpoint_prefix
from contract.lineage import Line, generation_of, newest_by_step
from contract.program import LOSSES
from contract.verify import broken_rules
from training import Workload
from training.durable import Head, History, LocalDataset, Store, Weights, open_store
from training.proof.attempt import AttemptRequest, fork, spawn
from training.proof.injector import Kill, send, send_signal


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
    rules_broken: Sequence[str] = ()


def read_outcome(store: Store, scratch: Path) -> RunOutcome:
    """Read a finished run from its store."""
    head = Head.read(store)
    assert head is not None
    trace = History.trace(store)
    lines = trace.lines
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
        rules_broken=broken_rules(trace),
    )


def differences(ours: RunOutcome, reference: RunOutcome) -> list[str]:
    """Differences from the uninterrupted run: the first step, evaluation and tensor that differ."""
    found = [*_first_step(ours, reference), *_first_evaluation(ours, reference), *ours.rules_broken]
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
        if Weights(tensors=outcome.tensors, about={}).sha256 != outcome.head.weights_sha256:
            found.append(f"{what} run's final weights are not those that its head names")
    return found


def broken_promises(store: Store, known: dict[str, bool]) -> list[str]:
    """Violations of what must hold after every attempt: all files that the head names are intact.

    `known` caches which keys are intact.
    """
    head = Head.read(store)
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
                known[key] = file.is_intact(store, key)
                if not known[key]:
                    broken.append(f"the head names {key}, which does not match its checksum")
    return broken


def _num_gained(lines: Sequence[Line], steps: Mapping[int, Mapping[str, Any]]) -> int:
    """Number of steps made after the boundary where their generation noticed its notice."""
    noticed = {line["generation"]: line["step"] for line in lines if line["kind"] == "notice"}
    return sum(step > noticed.get(line["generation"], step) for step, line in steps.items())


def _first_step(ours: RunOutcome, reference: RunOutcome) -> list[str]:
    for step in sorted(ours.steps.keys() | reference.steps.keys()):
        if step not in ours.steps or step not in reference.steps:
            return [f"step {step} is only in one of the runs"]
        for name in ("stage", "epoch", "ids_sum", "ids_crc", "lr", "loss", "metrics"):
            a, b = ours.steps[step].get(name), reference.steps[step].get(name)
            if a != b:
                stage = reference.steps[step]["stage"]
                return [f"step {step} (stage {stage!r}): {name} is {a} instead of {b}"]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two runs differ."""

    steps: tuple[int, ...]  # whose losses differ; without files, also the end of the longer run
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
    ends = {max(run.losses, default=0) for run in (ours, theirs)}
    if len(ends) > 1 and not ours.files:  # then nothing else shows the end
        steps.append(max(ends))
    names = sorted(ours.files.keys() | theirs.files.keys())
    files = tuple(name for name in names if ours.files.get(name) != theirs.files.get(name))
    return Difference(steps=tuple(steps), largest=largest, files=files)


_POLL_SECONDS = 0.002
# How long the other ranks may take to exit after rank 0.
_OUTLIVING_SECONDS = 10.0

_DATASET_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One attempt with its kills, and perhaps a second attempt at the same time."""

    kills: tuple[Kill, ...] = ()  # the first one whose moment comes is the attempt's
    second: Kill | None = None
    second_after_seconds: float = 0.0
    zombie_sleeps_seconds: float = 0.0
    fault_rate: float = 0.0  # share of the store's operations that go wrong
    fault_seed: int = 0
    is_fresh: bool = False  # a new interpreter instead of a fork


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptResult:
    """The end of one attempt, and whether and where a kill hit it."""

    code: int  # an exit code, or minus the signal's number
    kill: Kill | None  # the one that hit it
    hit_phase: str
    outlived_by: tuple[int, ...]  # ranks that ran on without rank 0
    num_faults: int
    trained_on: bool  # in the extra time of a notice
    follow_up: tuple[signal.Signals, ...]  # sent after a dated notice, before the attempt ended
    folder: Path
    seconds: float

    @property
    def log(self) -> str:
        """The output of rank 0."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""


class _Child:
    def __init__(self, request: AttemptRequest, is_fresh: bool) -> None:
        Path(request.folder).mkdir(parents=True)
        self.request = request
        self._statuses = request.statuses
        self.began = time.monotonic()
        self.code: int | None = None
        self.stopped_at: float | None = None
        self.seconds = 0.0
        self.outlived_by: tuple[int, ...] = ()
        self._hit: tuple[int, str] | None = None  # the number of the kill, and the phase
        self._hit_at: float | None = None
        self._sent_follow_up: list[signal.Signals] = []
        self.pid = spawn(request) if is_fresh else fork(request)
        self._statuses[0].begin(self.pid)

    def poll(self) -> None:
        """Check the attempt's state and send due signals."""
        pid, wait_status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(wait_status):
            self.stopped_at = time.monotonic()
        elif pid:
            self.code = os.waitstatus_to_exitcode(wait_status)
            self.seconds = time.monotonic() - self.began
            self._wait_for_other_ranks()
        self._hit = self._hit or next((s.hit for s in self._statuses if s.hit), None)
        if self.code is None:
            self._send_if_due()
            self._send_follow_up()

    @property
    def _kill(self) -> Kill | None:
        return self.request.kills[self._hit[0]] if self._hit else None

    def _send_if_due(self) -> None:
        for number, kill in enumerate(self.request.kills):
            if kill.seconds is None or self._hit:
                continue
            if time.monotonic() - self.began >= kill.seconds:
                phase = self._statuses[0].phase
                if send(kill, self._statuses):
                    self._hit = number, phase

    def _send_follow_up(self) -> None:
        """Send the signals that follow a dated notice, the last of which ends the machine."""
        kill = self._kill
        if kill is None:
            return
        now = time.monotonic()
        self._hit_at = self._hit_at or now
        for seconds, number in kill.follow_up[len(self._sent_follow_up) :]:
            if now - self._hit_at >= seconds:
                self._sent_follow_up.append(number)
                send_signal(number, kill, self._statuses)

    def _wait_for_other_ranks(self) -> None:
        """Wait until all ranks have exited after rank 0; kill those that do not."""
        end = time.monotonic() + _OUTLIVING_SECONDS
        left = list(range(1, len(self._statuses)))
        while left := [rank for rank in left if _is_running(self._statuses[rank].pid)]:
            if time.monotonic() > end:
                self.outlived_by = tuple(left)
                self.end()
                return
            time.sleep(_POLL_SECONDS)

    def resume(self) -> None:
        """Resume a suspended attempt."""
        self.stopped_at = None
        os.killpg(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def result(self) -> AttemptResult:
        assert self.code is not None
        shutil.rmtree(Path(self.request.folder) / "scratch", ignore_errors=True)
        return AttemptResult(
            code=self.code,
            kill=self._kill,
            hit_phase=self._hit[1] if self._hit else "",
            outlived_by=self.outlived_by,
            num_faults=sum(status.num_faults for status in self._statuses),
            trained_on=any(status.has_used_extra_time for status in self._statuses),
            follow_up=tuple(self._sent_follow_up),
            folder=Path(self.request.folder),
            seconds=self.seconds,
        )


@dataclass(kw_only=True, slots=True)
class Runs:
    """Runs below a URI; each attempt has its own folder below `out`."""

    request: AttemptRequest  # what all attempts share
    uri: str
    out: Path
    num_attempts: int = 0
    _stores: dict[str, Store] = field(default_factory=dict)

    def store(self, name: str) -> Store:
        """Open a run's store once: creating an S3 client takes longer than a step."""
        if name not in self._stores:
            self._stores[name] = open_store(f"{self.uri.rstrip('/')}/{name}")
        return self._stores[name]

    def outcome(self, name: str) -> RunOutcome:
        """Read a finished run."""
        return read_outcome(self.store(name), self.out)

    def attempt(self, name: str, experiment: Experiment, **own: Any) -> list[AttemptResult]:
        """Run an experiment until every process that it started has exited.

        `own` are the fields of the request that its attempts do not share with others.
        """
        children: list[_Child] = []

        def start(kills: tuple[Kill, ...], is_fresh: bool) -> None:
            self.num_attempts += 1
            writer = f"attempt-{self.num_attempts:04d}"
            request = replace(
                self.request,
                run_uri=self.store(name).uri,
                folder=str(self.out / "attempts" / name / writer),
                writer=writer,
                kills=kills,
                fault_rate=experiment.fault_rate,
                fault_seed=experiment.fault_seed + self.num_attempts,
                **own,
            )
            children.append(_Child(request, is_fresh))

        try:
            start(experiment.kills, experiment.is_fresh)
            first = children[0]
            while any(child.code is None for child in children):
                for child in children:
                    if child.code is None:
                        child.poll()
                second = experiment.second if len(children) == 1 else None
                if second and _is_time_for_second(experiment, first):
                    start((second,), False)
                stopped_at = first.stopped_at
                if stopped_at and time.monotonic() - stopped_at >= experiment.zombie_sleeps_seconds:
                    first.resume()
                time.sleep(_POLL_SECONDS)
            return [child.result() for child in children]
        finally:
            for child in children:
                if child.code is None:
                    child.end()
                    os.waitpid(child.pid, 0)


def _is_time_for_second(experiment: Experiment, first: _Child) -> bool:
    if any(kill.kind == "zombie" for kill in experiment.kills):
        return first.stopped_at is not None
    return time.monotonic() - first.began >= experiment.second_after_seconds


def _is_running(pid: int) -> bool:
    """Whether a process is alive, even if it is not this one's child (Linux)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def refuse_started_cuda(workload: str) -> None:
    """Refuse to fork attempts that could not use the GPU, because this process has called CUDA."""
    if not torch.cuda.device_count():
        return
    pid = os.fork()
    if pid == 0:
        # torch keeps no other record of a call that did not start all of CUDA.
        os._exit(int(torch.cuda._is_in_bad_fork()))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise UserError(
            f"workload {workload!r} called CUDA when it was imported; its attempts are forked from "
            "the same process, where CUDA starts only once: leave the GPU to the stages, which "
            "find it in Inputs.device"
        )


def made_dataset(given: str | None, workload: Workload[Any], count: int, folder: Path) -> Path:
    """Return the given folder, or a new one filled by the workload's own generator."""
    if given is not None:
        LocalDataset.open(Path(given))
        return Path(given)
    folder.mkdir()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # threads and pools that a generator starts end with the child
        code = 1
        try:
            meta = workload.make_dataset(folder, count, _DATASET_SEED, lambda done, total: None)
            LocalDataset.complete(folder, workload.name, meta)
            code = 0
        except UserError as error:
            os.write(writer, str(error).encode())
        except BaseException:  # the child must end here, whatever the generator raises
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise UserError(message or f"workload {workload.name!r} cannot make its dataset; see above")
    return folder
