"""A finished run against its plan: what was predicted, what happened, what to correct."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sizing import catalogue
from sizing.models.calibration import Entry
from sizing.models.constants import MIB
from sizing.plan.finished_run import FinishedRun
from sizing.plan.plan import Plan
from sizing.plan.request import Request

# Beyond these shares a constant should be corrected; the limits of `python -m sizing accuracy`.
_TIME_LIMIT, _MEMORY_LIMIT = 0.30, 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One quantity: predicted, actual, and the constant that explains the difference."""

    what: str
    predicted: float | None
    actual: float | None
    unit: str
    limit: float
    correct: str = ""

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
        if abs(self.ratio - 1) <= self.limit:
            return "as predicted"
        return f"correct {self.correct}" if self.correct else "differs"


# The only override that a plan knows.
_MICRO_BATCH = "micro_batch"


def request_of(run: FinishedRun, asked: Request) -> Request:
    """Return what would predict the run today: as asked, but with its GPUs and micro-batch."""
    micro_batch = run.overrides.get(_MICRO_BATCH, "")
    own = int(micro_batch) if micro_batch.isdecimal() else asked.micro_batch
    return replace(asked, gpus=run.world, micro_batch=own)


def unplanned(run: FinishedRun) -> list[str]:
    """Return the run's overrides that no plan knows, in whose effect the two may differ."""
    return sorted(set(run.overrides) - {_MICRO_BATCH})


def compare(run: FinishedRun, plan: Plan) -> list[Compared]:
    """Compare every quantity that both know; config.json's prediction precedes today's plan."""
    spot = plan.spot
    then = run.prediction
    hours = then.get("hours_p50", spot.hours_p50 if spot else None)
    if hours is not None:
        # A prediction begins when a machine is asked for, a receipt with its first attempt.
        start = plan.restart
        hours = max(0.0, hours - (start.launch + start.user_data + start.sync) / 3600)
    usd = then.get("usd_spot_p50", spot.usd_p50 if spot else None)
    # Waits between machines included.
    at_spot_price = run.seconds / 3600 * plan.inputs.spot_price.usd_per_hour
    memory = then.get("gpu_memory_mib", plan.work.memory.need)
    rows = [
        Compared(
            what="hours from the first attempt",
            predicted=hours,
            actual=run.seconds / 3600,
            unit="h",
            limit=_TIME_LIMIT,
            correct="time_factor or launch_seconds",
        ),
        Compared(
            what="dollars (Spot)",
            predicted=usd,
            actual=run.usd if run.usd is not None else at_spot_price,
            unit="$",
            limit=_TIME_LIMIT,
            correct="the Spot price of sizing/catalogue/prices.py, if the hours are as predicted",
        ),
        Compared(
            what="GPU memory allocated",
            predicted=plan.work.memory.allocated if run.peak_gpu_bytes else memory,
            actual=run.peak_gpu_bytes / MIB if run.peak_gpu_bytes else None,
            unit="MiB",
            limit=_MEMORY_LIMIT,
            correct="memory_factor",
        ),
        Compared(
            what="interruptions",
            predicted=spot.interruptions if spot else None,
            actual=float(run.interruptions),
            unit="",
            limit=1.0,
            correct="the rate (`plan --rate`), of which one run says little",
        ),
        Compared(
            what="checkpoint",
            predicted=float(plan.checkpoint_bytes),
            actual=float(run.checkpoint_bytes) or None,
            unit="bytes",
            limit=0.05,
            correct="sizing/footprints.json (`python -m training measure`)",
        ),
        Compared(
            what="a save",
            predicted=plan.notice.save,
            actual=run.save_seconds,
            unit="s",
            limit=_TIME_LIMIT,
            correct="upload_share",
        ),
    ]
    return rows + [
        Compared(
            what=f"a step of {stage.footprint.stage}",
            predicted=stage.step.seconds,
            actual=run.step_seconds.get(stage.footprint.stage),
            unit="s",
            limit=_TIME_LIMIT,
            correct="time_factor",
        )
        for stage in plan.work.stages
        if stage.footprint.kind == "train"
    ]


def _step_constants(measured: float, plan: Plan) -> dict[str, float]:
    """Return the constant that makes the plan's main step as long as the measured one.

    What kernel launches bind is the host's doing: it holds on other GPUs too. The rest does not.
    """
    step, used = plan.work.main.step, plan.inputs.constants
    launches = measured - step.optimizer
    if step.bound_by == "kernel launches" and launches > step.compute + step.traffic:
        return {"launch_factor": used.launch_factor * launches / step.launches}
    return {"time_factor": used.time_factor * measured / step.seconds}


def calibration(run: FinishedRun, plan: Plan) -> Entry:
    """Return the constants that would have made today's plan right.

    A ValueError if the run says nothing about the size's GPU: another device, or no metrics.
    """
    gpu, name = plan.inputs.instance.gpu, plan.inputs.gpu.name.split()[-1]
    if name not in run.device and gpu not in run.device:
        raise ValueError(
            f"the run {run.run_id} was on {run.device!r}, not on the {gpu} of {plan.request.size}, "
            "and cannot calibrate it; give the --size that it ran on"
        )
    main = plan.work.main.footprint.stage
    if main not in run.step_seconds:
        raise ValueError(
            f"the run {run.run_id} has no metrics of stage {main!r} next to its receipt; "
            "give the run's folder, not the receipt alone"
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
