"""A finished run against its plan: what was predicted, what happened, what to correct."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sizing import catalogue
from sizing.models.calibration import Entry
from sizing.models.constants import MIB
from sizing.plan.finished_run import FinishedRun
from sizing.plan.plan import Plan
from sizing.plan.request import Request

# Beyond these errors a constant should be corrected; the limits of `python -m sizing accuracy`.
_TIME_LIMIT, _MEMORY_LIMIT = 0.30, 0.15


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
    "a save": ("s", _TIME_LIMIT, "upload_share"),
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
        start = plan.restart
        hours = max(0.0, hours - (start.launch + start.user_data + start.sync) / 3600)
    usd = then.get("usd_spot_p50", spot.usd_p50 if spot else None)
    # Waits between machines are included.
    at_spot_price = run.seconds / 3600 * plan.inputs.spot_price.usd_per_hour
    memory, peak = then.get("gpu_memory_mib", plan.work.memory.need), None
    if run.peak_gpu_bytes:
        memory, peak = plan.work.memory.allocated, run.peak_gpu_bytes / MIB
    found: dict[str, tuple[float | None, float | None]] = {
        "hours from the first attempt": (hours, run.seconds / 3600),
        "dollars (Spot)": (usd, at_spot_price if run.usd is None else run.usd),
        "GPU memory allocated": (memory, peak),
        "interruptions": (spot.interruptions if spot else None, float(run.interruptions)),
        "checkpoint": (float(plan.checkpoint_bytes), float(run.checkpoint_bytes) or None),
        "a save": (plan.notice.save, run.save_seconds),
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
    gpu, name = plan.inputs.instance.gpu, plan.inputs.gpu.name.split()[-1]
    if name not in run.device and gpu not in run.device:
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
