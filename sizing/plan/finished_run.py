"""A finished run as `sizing plan --run` and `advise` read it, compared with its plan.

Reads a run's folder (a local one, or downloaded from the run bucket) or its receipt alone.
"""

import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from contract.goodput import PLANNED, USEFUL
from contract.keys import CONFIG, EVENTS, METRICS, RECEIPT
from contract.metrics import LineReader
from contract.program import WORKLOAD
from sizing import catalogue
from sizing.models.calibration import Entry
from sizing.models.constants import MIB
from sizing.plan.goodput import planned_goodput
from sizing.plan.plan_inputs import Request
from sizing.plan.size_plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """The outcome of a run by its files; None for what they do not contain."""

    run_id: str
    workload: str
    recipe: str
    state: str
    device: str
    size: str | None
    seconds: float
    generations: int
    checkpoint_bytes: int
    step_seconds: Mapping[str, float]
    save_seconds: float | None
    data_wait: float | None
    peak_gpu_bytes: int | None
    usd: float | None
    goodput: float | None
    prediction: Mapping[str, float]
    overrides: Mapping[str, str]
    world: int
    restarts: Mapping[str, float]  # constants that the run's events measured, by name
    starts: Sequence[float]  # seconds from each machine's boot to its first step, in order

    @property
    def interruptions(self) -> int:
        """The number of generations after the first: each took over from an interrupted one."""
        return max(0, self.generations - 1)

    def signals(self) -> dict[str, float]:
        """Return the signals that the rules of sizing/plan/triggers.py know."""
        found = {"hours_per_experiment": self.seconds / 3600}
        if self.data_wait is not None:
            found["data_wait_percent"] = 100 * self.data_wait
        return found


def read_run(path: Path) -> FinishedRun:
    """Read a run's folder or receipt; anything else is a ValueError."""
    receipt_file = path / RECEIPT if path.is_dir() else path
    receipt = _read(receipt_file)
    for name in ("run_id", "workload", "recipe", "seconds"):
        if name not in receipt:
            raise ValueError(f"{receipt_file} is not a receipt: it has no {name!r}")
    if receipt["workload"] == WORKLOAD:
        raise ValueError(
            f"{receipt['run_id']} ran a program, which has no plan to compare with; "
            "`python -m training report` shows what it did"
        )
    folder, key = receipt_file.parent, receipt.get("numerics_key") or {}
    config = _read(folder / CONFIG) if (folder / CONFIG).exists() else {}
    lines, bought = _metrics(folder), receipt.get("goodput") or {}
    prediction = receipt.get("prediction") or config.get("prediction") or {}
    return FinishedRun(
        run_id=str(receipt["run_id"]),
        workload=str(receipt["workload"]),
        recipe=str(receipt["recipe"]),
        state=str(receipt.get("state", "finished")),
        device=str(key.get("gpu") or key.get("device", "unknown")),
        size=_text(prediction.get("size")),
        seconds=float(receipt["seconds"]),
        generations=int(receipt.get("generations", 1)),
        checkpoint_bytes=int(receipt.get("checkpoint_bytes", 0)),
        step_seconds={stage: median(values) for stage, values in lines.step_seconds.items()},
        save_seconds=median(lines.commit_seconds) if lines.commit_seconds else None,
        data_wait=median(lines.waits) if lines.waits else None,
        peak_gpu_bytes=receipt.get("peak_gpu_bytes"),
        usd=sum(bought.get("usd", {}).values()) or None,
        goodput=bought.get("goodput"),
        prediction={name: v for name, v in prediction.items() if isinstance(v, int | float)},
        overrides={name: str(value) for name, value in (receipt.get("overrides") or {}).items()},
        world=_ranks(receipt),
        restarts=seen_restarts(folder),
        starts=_starts(folder, lines.first_steps),
    )


def _ranks(receipt: Mapping[str, Any]) -> int:
    """Return how many ranks trained at the end; older receipts have it in the numerics key."""
    machines = receipt.get("machines") or [receipt.get("numerics_key") or {}]
    return int(machines[-1].get("ranks") or machines[-1].get("world") or 1)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; use a run's folder or its receipt.json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a receipt: it is not a JSON object")
    return found


@dataclass(kw_only=True, slots=True)
class _Lines:
    """The content of all attempts' metrics lines, kept as plain numbers for long runs."""

    step_seconds: dict[str, "array[float]"] = field(default_factory=dict)  # by stage
    waits: "array[float]" = field(default_factory=lambda: array("d"))
    commit_seconds: list[float] = field(default_factory=list)
    first_steps: dict[int, datetime] = field(default_factory=dict)  # by generation

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line."""
        if line["kind"] == "step":
            rate, count = line.get("samples_per_second"), line.get("num_samples")
            if rate and count:
                seconds = self.step_seconds.setdefault(line["stage"], array("d"))
                # The rate includes waits for data, which a faster GPU does not shorten.
                seconds.append(count / float(rate) * (1 - (line.get("data_wait") or 0.0)))
            if "time" in line:
                self.first_steps.setdefault(line["generation"], _time(line))
            if line.get("data_wait") is not None:
                self.waits.append(float(line["data_wait"]))
        elif line["kind"] == "commit":
            self.commit_seconds.append(float(line["seconds"]))


def _metrics(folder: Path) -> _Lines:
    """Read all lines of all attempts except damaged ones."""

    def names() -> list[str]:
        return [f"{METRICS}{path.name}" for path in (folder / METRICS).glob("*")]

    found = _Lines()
    for line in LineReader(names, lambda keys: (_content(folder / key) for key in keys)).new():
        found.add(line)
    return found


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # merged since it was listed
        return None


def seen_restarts(folder: Path) -> dict[str, float]:
    """Return medians over the run's machines, by the constant they measure.

    user_data_seconds   user data, for which the trainer of a workload waits, but not for the sync
    first_step_seconds   from its end until a replacement has resumed

    Damaged events are ignored; a run without events, or on a laptop, teaches nothing.
    """
    boots, steps = [], []
    for events in _by_machine(folder):
        boot, resumed = events.get("boot"), events.get("resumed")
        if boot is None or "seconds" not in boot:
            continue
        boots.append(float(boot["seconds"]))
        if resumed is not None:
            steps.append((_time(resumed) - _time(boot)).total_seconds())
    seen = {"user_data_seconds": boots, "first_step_seconds": [s for s in steps if s >= 0]}
    return {name: median(seconds) for name, seconds in seen.items() if seconds}


def _starts(folder: Path, first_steps: Mapping[int, datetime]) -> list[float]:
    """Return the seconds from the start of each machine's user data to its first step."""
    found = []
    for events in _by_machine(folder):
        boot, taken = events.get("boot", {}), events.get("take-over", {})
        if "seconds" in boot and (step := first_steps.get(taken.get("generation", 0))):
            found.append((step - _time(boot)).total_seconds() + float(boot["seconds"]))
    return found


def _by_machine(folder: Path) -> Iterable[Mapping[str, Mapping[str, Any]]]:
    """Return each machine's events by name, the first of each: its trainer may start again."""
    by_machine: dict[str, dict[str, Mapping[str, Any]]] = {}
    for event in _events(folder):
        by_machine.setdefault(str(event.get("instance_id")), {}).setdefault(event["name"], event)
    return by_machine.values()


def _events(folder: Path) -> Iterable[dict[str, Any]]:
    for path in sorted((folder / EVENTS).glob("*.json")):
        try:
            event = json.loads(path.read_text(encoding="utf-8"))
            _time(event)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if "name" in event:
            yield event


def _time(event: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(event["time"])


# Beyond these errors a constant should be corrected; the limits of `python -m sizing accuracy`.
_TIME_LIMIT, _MEMORY_LIMIT = 0.30, 0.15


# The waits for the dataset's sync are part of both.
_START, _RESTART = "boot to the first step", "boot to a replacement's first step"
_OF_START = "user_data_seconds or first_step_seconds"
# For each quantity its unit, the limit, and the constant that explains a difference.
_QUANTITIES: Mapping[str, tuple[str, float, str]] = {
    "hours from the first attempt": ("h", _TIME_LIMIT, "time_factor or launch_seconds"),
    "dollars (Spot)": (
        *("$", _TIME_LIMIT),
        "the Spot price of sizing/catalogue/prices.py, if the hours are as predicted",
    ),
    "GPU memory allocated": ("MiB", _MEMORY_LIMIT, "memory_factor"),
    "interruptions": ("", 1.0, "the rate (`plan --rate`), of which one run says little"),
    "checkpoint": ("bytes", 0.05, "sizing/footprints.json (`python -m training measure`)"),
    "goodput": ("", 0.15, "the cause of which the receipt's goodput has more than was planned"),
    "a save": ("s", _TIME_LIMIT, "upload_share"),
    _START: ("s", _TIME_LIMIT, _OF_START),
    _RESTART: ("s", _TIME_LIMIT, _OF_START),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity: predicted, actual, and the constant that explains the difference."""

    what: str
    predicted: float | None
    actual: float | None
    unit: str
    limit: float
    correct: str

    @property
    def ratio(self) -> float | None:
        """Actual / predicted."""
        if not self.predicted or self.actual is None:
            return None
        return self.actual / self.predicted

    @property
    def verdict(self) -> str:
        """ "as predicted", or which constant to correct."""
        if self.ratio is None:
            return "unknown"
        return "as predicted" if abs(self.ratio - 1) <= self.limit else f"correct {self.correct}"


# The only override that a plan covers.
_MICRO_BATCH = "micro_batch"


def request_of(run: FinishedRun, asked: Request) -> Request:
    """Return the request that predicts the run today: `asked`, with its GPUs and micro-batch."""
    micro_batch = run.overrides.get(_MICRO_BATCH, "")
    own = int(micro_batch) if micro_batch.isdecimal() else asked.micro_batch
    return replace(asked, gpus=run.world, micro_batch=own)


def unplanned(run: FinishedRun) -> list[str]:
    """Return the run's overrides that no plan covers, whose effect may make the two differ."""
    return sorted(set(run.overrides) - {_MICRO_BATCH})


def compare(run: FinishedRun, plan: Plan) -> list[Compared]:
    """Compare every quantity known to both; config.json's prediction precedes today's plan."""
    spot = plan.spot
    then = run.prediction
    hours = then.get("hours_p50", spot.hours_p50 if spot else None)
    if hours is not None:
        # A prediction begins when a machine is requested, a receipt with its first attempt.
        hours = max(0.0, hours - (plan.first.launch + plan.first.user_data) / 3600)
    usd = then.get("usd_spot_p50", spot.usd_p50 if spot else None)
    # Waits between machines are included.
    at_spot_price = run.seconds / 3600 * plan.inputs.spot_price.usd_per_hour
    memory, peak = then.get("gpu_memory_mib", plan.work.memory.need), None
    if run.peak_gpu_bytes:
        memory, peak = plan.work.memory.allocated, run.peak_gpu_bytes / MIB
    later = median(run.starts[1:]) if run.starts[1:] else None
    found: dict[str, tuple[float | None, float | None]] = {
        "hours from the first attempt": (hours, run.seconds / 3600),
        "dollars (Spot)": (usd, at_spot_price if run.usd is None else run.usd),
        "GPU memory allocated": (memory, peak),
        "interruptions": (spot.interruptions if spot else None, float(run.interruptions)),
        "checkpoint": (float(plan.inputs.checkpoint_bytes), float(run.checkpoint_bytes) or None),
        "goodput": (then.get(PLANNED + USEFUL, planned_goodput(plan).get(USEFUL)), run.goodput),
        "a save": (plan.notice.save, run.save_seconds),
        _START: (plan.first.to_training - plan.first.launch, next(iter(run.starts), None)),
        _RESTART: (plan.restart.to_training - plan.restart.launch, later),
    }
    rows = [
        Compared(what, predicted, actual, *_QUANTITIES[what])
        for what, (predicted, actual) in found.items()
    ]
    for stage in plan.work.stages:
        name = stage.footprint.stage
        if stage.footprint.kind == "train":
            predicted, actual = stage.step.seconds, run.step_seconds.get(name)
            what = f"a step of {name}"
            rows.append(Compared(what, predicted, actual, "s", _TIME_LIMIT, "time_factor"))
    return rows


def _step_constants(measured: float, plan: Plan) -> dict[str, float]:
    """Return the constant that makes the plan's main step as long as the measured one.

    Launches come from the host, so their constant holds on other GPUs too; the rest does not.
    """
    step, used = plan.work.main.step, plan.inputs.constants
    launches = measured - step.optimizer
    if step.bound_by == "kernel launches" and launches > step.compute + step.traffic:
        return {"launch_factor": used.launch_factor * launches / step.launches}
    return {"time_factor": used.time_factor * measured / step.seconds}


def calibration(run: FinishedRun, plan: Plan) -> Entry:
    """Return the constants that would have made today's plan correct.

    A ValueError if the run says nothing about the size's GPU: another device, or no metrics.
    """
    gpu = plan.inputs.instance.gpu
    # Whole words: an L40S is no L4.
    if not set(gpu.split()[1:]) <= set(re.findall(r"\w+", run.device)):
        raise ValueError(
            f"the run {run.run_id} was on {run.device!r}, not on the {gpu} of {plan.request.size}, "
            "and cannot calibrate it; use the --size that it ran on"
        )
    main = plan.work.main.footprint.stage
    if main not in run.step_seconds:
        raise ValueError(
            f"the run {run.run_id} has no metrics of stage {main!r} next to its receipt; "
            "use the run's folder, not the receipt alone"
        )
    constants = {**_step_constants(run.step_seconds[main], plan), **run.restarts}
    if "first_step_seconds" in constants:
        # Until it has resumed: the plan counts the checkpoint's read, which that includes, itself.
        first_step = constants["first_step_seconds"] - plan.restart.resume
        constants["first_step_seconds"] = max(1.0, first_step)
    if run.peak_gpu_bytes:
        ratio = run.peak_gpu_bytes / MIB / plan.work.memory.allocated
        constants["memory_factor"] = plan.inputs.constants.memory_factor * ratio
    return Entry(
        run=run.run_id,
        workload=run.workload,
        recipe=run.recipe,
        size=plan.request.size,
        gpu=catalogue.find(plan.request.size).gpu,
        date=datetime.now(UTC).date().isoformat(),
        constants={name: float(f"{value:.4g}") for name, value in constants.items()},
    )
