"""Everything that a plan starts from: the request, and the facts on its size and workload."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from sizing.catalogue import InstanceType, Price
from sizing.catalogue.gpus import Gpu, find_gpu
from sizing.models import footprints
from sizing.models.calibration import calibrated
from sizing.models.constants import GIB, Constants
from sizing.models.data_path import (
    DATA,
    EPOCH_BYTES_PER_SAMPLE,
    DataFacts,
    Rate,
    instance_store_rate,
    network_rate,
    volume_rate,
)
from sizing.models.footprints import Footprint
from sizing.plan.request import Request
from sizing.spot.interruptions import Interruptions, interruptions, interruptions_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """A request with everything looked up for it; nothing here is predicted yet."""

    request: Request
    instance: InstanceType
    gpu: Gpu
    constants: Constants
    calibrated_by: tuple[str, ...]
    footprints_file: Path
    footprints: tuple[Footprint, ...]
    facts: DataFacts | None
    dataset_bytes: float
    volume: Rate
    network: Rate
    interruptions: Interruptions
    price: Price  # of all hosts
    spot_price: Price

    @property
    def knows_data(self) -> bool:
        """Whether anything is known of the workload's data."""
        return self.facts is not None or self.dataset_bytes > 0

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the largest checkpoint."""
        return max(footprint.checkpoint_bytes for footprint in self.footprints)

    @property
    def artifact_bytes(self) -> float:
        """Bytes a replacement fetches besides its checkpoint: derived data of Prepare stages."""
        prepared = [each.samples_per_epoch for each in self.footprints if each.kind == "prepare"]
        return sum(prepared) * self.facts.epoch_bytes_per_sample if self.facts else 0.0


def look_up(
    request: Request,
    *,
    footprints_file: Path,
    calibration_file: Path,
    constants: Constants | None = None,
) -> PlanInputs:
    """Look up what the plan needs; a request that cannot be planned is a ValueError."""
    instance = request.find_instance()
    gpu = find_gpu(instance.gpu, instance.gpu_memory_mib)
    learned, runs = calibrated(
        request.workload, request.recipe, request.size, instance.gpu, path=calibration_file
    )
    used = constants or learned
    stages = _as_asked(
        footprints.counted_stages(
            request.workload,
            request.recipe,
            micro_batch=request.micro_batch,
            batch=request.batch,
            path=footprints_file,
        ),
        request,
    )
    if request.sharded and request.ranks > 1:
        stages = tuple(
            each.sharded(request.ranks) if each.kind == "train" else each for each in stages
        )
    facts = DATA.get(request.workload) or _given_data(request, stages)
    epoch_bytes = EPOCH_BYTES_PER_SAMPLE.get((request.workload, request.recipe))
    if facts is not None and epoch_bytes is not None:
        facts = replace(facts, epoch_bytes_per_sample=epoch_bytes)
    if (dataset := request.dataset) is not None:
        # A user's own workloads and programs may be planned with any dataset.
        both = {request.workload, dataset.workload}
        if len(both) == 2 and both <= DATA.keys():
            raise ValueError(
                f"{dataset.name!r} is a dataset of workload {dataset.workload}, not of "
                f"{request.workload}; use the manifest of a dataset of {request.workload}"
            )
        facts = dataset.applied(facts)
    price, spot_price = request.prices.require(request.size)
    return PlanInputs(
        request=request,
        instance=instance,
        gpu=gpu,
        constants=used,
        calibrated_by=runs,
        footprints_file=footprints_file,
        footprints=stages,
        facts=facts,
        dataset_bytes=_dataset_bytes(request, facts, stages),
        volume=_data_rate(request, instance, used),
        network=network_rate(instance, used),
        interruptions=_interruptions(request),
        price=replace(price, usd_per_hour=price.usd_per_hour * request.hosts),
        spot_price=replace(spot_price, usd_per_hour=spot_price.usd_per_hour * request.hosts),
    )


def _data_rate(request: Request, instance: InstanceType, constants: Constants) -> Rate:
    """Return the data mount's rate; an instance store without published figures counts as EBS."""
    if request.data_on == "nvme" and (rate := instance_store_rate(instance)) is not None:
        return rate
    return volume_rate(instance, request.volume_mb_per_second(instance), constants)


def _as_asked(stages: tuple[Footprint, ...], request: Request) -> tuple[Footprint, ...]:
    """Return the stages with the request's samples and epochs; their counts do not change.

    `samples` counts the entire dataset: every stage keeps its share of it.
    """
    samples = request.samples or (request.dataset and request.dataset.train_samples)
    if samples is None and request.epochs is None:
        return stages
    whole = max(stage.samples_per_epoch for stage in stages)
    share = (samples or whole) / whole
    if share == 1 and request.epochs is None:
        return stages
    return tuple(_scaled(stage, share, request.epochs) for stage in stages)


def _scaled(stage: Footprint, share: float, epochs: float | None) -> Footprint:
    trains = stage.kind == "train"
    if epochs is None or not trains:
        epochs = stage.epochs
    samples = max(1, round(stage.samples_per_epoch * share))
    evaluations = math.ceil(stage.evaluations * epochs / stage.epochs)
    return replace(
        stage,
        samples_per_epoch=samples,
        validation_samples=round(stage.validation_samples * share),
        steps_per_epoch=math.ceil(samples / (stage.global_batch if trains else stage.micro_batch)),
        epochs=epochs,
        evaluations=evaluations,
        phases=tuple(
            replace(phase, epochs=phase.epochs * epochs / stage.epochs) for phase in stage.phases
        ),
    )


def _given_data(request: Request, stages: tuple[Footprint, ...]) -> DataFacts | None:
    """Return a model's facts without a workload: data read once an epoch, with a free loader."""
    if not request.dataset_gib:
        return None
    samples = max(stage.samples_per_epoch + stage.validation_samples for stage in stages)
    each = request.dataset_gib * GIB / samples
    return DataFacts(
        dataset_bytes_per_sample=each,
        epoch_bytes_per_sample=each,
        loader_cpu_seconds=0.0,
        basis="given",
        source="--dataset-gib; the loader's CPU time is not known and left out",
    )


def _dataset_bytes(
    request: Request, facts: DataFacts | None, stages: tuple[Footprint, ...]
) -> float:
    if request.dataset_gib:
        return request.dataset_gib * GIB
    if request.dataset is not None:
        return request.dataset.num_bytes
    samples = max(stage.samples_per_epoch + stage.validation_samples for stage in stages)
    return samples * facts.dataset_bytes_per_sample if facts else 0.0


def _interruptions(request: Request) -> Interruptions:
    """Return those of the trace if there is one, else published ones with any rate that was set.

    The loss of one machine interrupts a run of several: N are lost N times as often. Waiting for
    all of them at once is not counted as longer, because by how much has not been published.
    """
    if request.trace is not None:
        return interruptions_of(request.trace)
    found = interruptions(pools=request.pools)
    if request.rate_per_hour is not None:
        found = replace(found, rate_per_hour=request.rate_per_hour, source="given")
    return replace(found, rate_per_hour=found.rate_per_hour * request.hosts)
