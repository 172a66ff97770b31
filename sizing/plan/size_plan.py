"""The plan of a run on one size: does it fit, its hours and dollars, does it meet the notice.

Composes the models; its only own formula is the sum over stages. `python -m sizing plan` prints
it, cdk synth annotates it, `plan --run` compares a receipt with it; plan/checks.py judges it.
"""

from dataclasses import dataclass
from pathlib import Path

from contract.auto_interval import choose_interval
from contract.grammar import parse_interval
from contract.notice import idle_seconds
from contract.program import WORKLOAD as PROGRAM
from sizing.models.calibration import CALIBRATION_FILE
from sizing.models.constants import GIB, Constants
from sizing.models.footprints import FOOTPRINTS_FILE
from sizing.models.host import HostMemory, host_memory, start_memory
from sizing.models.notice import NoticeFit, notice_fit
from sizing.models.restart import ANYWHERE, FILE_SECONDS, Restart, Sync
from sizing.plan.plan_inputs import PlanInputs, Request, look_up
from sizing.plan.work import PlannedWork, StagePlan, plan_work
from sizing.service_prices import initialization_usd
from sizing.spot.forecast import SpotForecast, forecast
from sizing.spot.pattern import NEVER, NOTICE_ARRIVES
from sizing.spot.simulation import SpotRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All predictions; `spot` is None if the run would never end on Spot.

    `first` is the start of the run's first machine, `restart` that of a replacement.
    """

    inputs: PlanInputs
    host: HostMemory
    work: PlannedWork
    notice: NoticeFit
    first: Restart
    restart: Restart
    spot: SpotForecast | None

    @property
    def request(self) -> Request:
        """The request that this plan answers."""
        return self.inputs.request

    @property
    def gpu_memory_need(self) -> float:
        """MiB that the runs of one GPU need together."""
        return self.work.memory.need * self.request.runs_per_gpu(self.inputs.instance)

    @property
    def used_gpus(self) -> int:
        """GPUs of the size that the runs use."""
        there = self.inputs.instance.num_gpus // self.request.gpus
        return self.request.gpus * min(self.request.runs, there)

    @property
    def interruption_seconds(self) -> float:
        """Seconds that an interruption costs: the restart, and any unsaved work."""
        lost = 0.0 if self.spot is None else self.spot.interval_seconds / 2
        return self.restart.seconds + (0.0 if self.notice.fits else lost)

    @property
    def usd_of_interruption(self) -> float:
        """Dollars of those seconds on Spot, and of loading the replacement's root volume."""
        hours = self.interruption_seconds / 3600
        return hours * self.inputs.spot_price.usd_per_hour + self.usd_of_initialization

    @property
    def usd_of_initialization(self) -> float:
        """Dollars of loading the root volume of each host at the requested rate."""
        rate = self.request.root_initialization_mib_per_second
        return initialization_usd(rate) * self.request.hosts

    @property
    def usd_of_initializations(self) -> float:
        """Those dollars for each machine of the run on Spot: the first, and the replacements."""
        machines = 1 + (self.spot.interruptions if self.spot else 0)
        return machines * self.usd_of_initialization

    @property
    def hours_on_demand(self) -> float:
        """Hours of one uninterrupted run, its start included."""
        return (self.work.seconds + self.first.seconds) / 3600

    @property
    def hours_low(self) -> float:
        """Those hours if every step is as fast as the p10 of similar published runs."""
        return (self.work.seconds_low + self.first.seconds) / 3600

    @property
    def hours_high(self) -> float:
        """Those hours if every step is as slow as the p90 of similar published runs."""
        return (self.work.seconds_high + self.first.seconds) / 3600

    @property
    def usd_on_demand(self) -> float:
        """Dollars of the instance alone for one uninterrupted run."""
        return self.hours_on_demand * self.inputs.price.usd_per_hour


def make_plan(
    request: Request,
    *,
    footprints_file: Path = FOOTPRINTS_FILE,
    calibration_file: Path = CALIBRATION_FILE,
    constants: Constants | None = None,
) -> Plan:
    """Return the plan; a request that cannot be planned is a ValueError in one sentence."""
    inputs = look_up(
        request,
        footprints_file=footprints_file,
        calibration_file=calibration_file,
        constants=constants,
    )
    host = host_memory(
        inputs.instance,
        inputs.constants,
        runs=request.runs,
        data_bytes_each=request.unshared_gib * GIB,
        starting=start_memory(inputs.footprints),
    )
    work = plan_work(inputs, host)
    notice = notice_fit(
        # Runs side by side save at the same notice over the same network.
        checkpoint_bytes=inputs.checkpoint_bytes * request.runs,
        longest_step_seconds=work.longest_step_seconds,
        gpu=inputs.gpu,
        instance=inputs.instance,
        constants=inputs.constants,
        notice_seconds=request.notice_seconds,
    )
    sync = _sync(inputs, work)
    replacement = sync.restart(
        inputs.constants,
        restored_bytes=inputs.checkpoint_bytes + inputs.artifact_bytes,
        passed=ANYWHERE,
    )
    first = sync.restart(inputs.constants)
    return Plan(
        inputs=inputs,
        host=host,
        work=work,
        notice=notice,
        first=first,
        restart=replacement,
        spot=_forecast(inputs, host, work, notice, first, replacement),
    )


def _sync(inputs: PlanInputs, work: PlannedWork) -> Sync:
    """Return the sync as the longest stage, in which most interruptions fall, meets it."""
    return Sync(
        network=inputs.network,
        volume=inputs.volume,
        num_bytes=inputs.dataset_bytes,
        first_bytes=inputs.first_bytes(work.main.footprint),
        epoch_seconds=work.main.epoch_seconds,
        file_seconds=inputs.num_files * FILE_SECONDS,
        is_of_program=inputs.request.workload == PROGRAM,
    )


def _forecast(
    inputs: PlanInputs,
    host: HostMemory,
    work: PlannedWork,
    notice: NoticeFit,
    first: Restart,
    replacement: Restart,
) -> SpotForecast | None:
    """Return hours and dollars on Spot; None if the run would never end."""
    request, taken = inputs.request, inputs.interruptions
    waits = saving_seconds(inputs, host, notice)
    interval = interval_seconds(request.checkpoint_interval, work.main)
    if interval is None:
        interval = choose_interval(
            cost_seconds=waits,
            durable_seconds=notice.save,
            life_seconds=3600 / max(taken.saving_rate, NEVER),
            epoch_seconds=work.main.epoch_seconds or None,
        ).seconds
    try:
        run = SpotRun(
            work_seconds=max(work.seconds, 1e-3),
            work_range=(max(work.seconds_low, 1e-3), max(work.seconds_high, 1e-3)),
            rate_per_hour=taken.rate_per_hour,
            first_seconds=first.seconds,
            restart_seconds=replacement.seconds,
            checkpoint_seconds=waits,
            interval_seconds=interval,
            notice_saves=NOTICE_ARRIVES if notice.fits else 0.0,
            notice_seconds=idle_at_notice(request, notice),
            wait_seconds=taken.wait_seconds,
            pattern=taken.pattern,
        )
        usd = inputs.spot_price.usd_per_hour
        return forecast(run, usd_per_hour=usd)
    except ValueError:
        return None


def saving_seconds(inputs: PlanInputs, host: HostMemory, notice: NoticeFit) -> float:
    """Return the GPU time that a save takes.

    The copy keeps the GPU waiting; hash and upload continue during training.
    """
    return notice.copy + 0.1 if host.can_hold(inputs.checkpoint_bytes) else notice.save


def idle_at_notice(request: Request, notice: NoticeFit) -> float:
    """Return the seconds of a notice during which the trainer does not train."""
    if not request.trains_on_at_notice:
        return notice.budget
    return idle_seconds(
        save_seconds=notice.save, step_seconds=notice.step, notice_seconds=notice.budget
    )


def interval_seconds(text: str, main: StagePlan) -> float | None:
    """Return the checkpoint interval in seconds of the main stage; None for `auto`."""
    interval = parse_interval(text)
    if interval.unit == "auto":
        return None
    seconds = {"s": 1.0, "steps": main.step.seconds, "epochs": main.epoch_seconds}[interval.unit]
    return max(1.0, interval.value * seconds)
