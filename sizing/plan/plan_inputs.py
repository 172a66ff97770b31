"""Everything that a plan starts from: the request, its dataset's manifest, the facts looked up.

A request is made by the command line, cdk synth or a finished run.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from contract.notice import MAX_SECONDS
from contract.run_env import DATA_PLACES
from contract.trainer_options import RANKS
from sizing import catalogue
from sizing.catalogue import InstanceType, Price
from sizing.catalogue.gpus import Gpu, find_gpu
from sizing.catalogue.refresh import PriceBook
from sizing.models import footprints
from sizing.models.calibration import calibrated
from sizing.models.constants import GIB, Constants
from sizing.models.data_path import (
    DATA,
    EPOCH_BYTES_PER_SAMPLE,
    GP3_MB_PER_SECOND,
    MB_PER_MIB,
    DataFacts,
    Rate,
    instance_store_rate,
    network_rate,
    volume_rate,
)
from sizing.models.footprints import Footprint
from sizing.spot.interruptions import HISTORY_FILE, Interruptions, interruptions, learned


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFacts:
    """A dataset; None or "" if its manifest does not say. Bytes and pixels: means of its images.

    `file_bytes`: of each file, the largest first.
    """

    name: str
    num_bytes: int
    file_bytes: tuple[int, ...] = field(default=(), compare=False, repr=False)
    workload: str = ""
    train_samples: int | None = None
    sample_bytes: float | None = None
    sample_pixels: float | None = None

    def applied(self, facts: DataFacts | None) -> DataFacts | None:
        """Return the workload's usual facts with this dataset's bytes and pixels in them."""
        if facts is None or self.sample_bytes is None:
            return facts
        seconds = facts.loader_cpu_seconds
        if self.sample_pixels is not None:
            more = (self.sample_pixels - facts.usual_pixels) / 1e6
            seconds += more * facts.cpu_seconds_per_megapixel
        return replace(
            facts,
            dataset_bytes_per_sample=self.sample_bytes,
            epoch_bytes_per_sample=self.sample_bytes,
            loader_cpu_seconds=seconds,
            source=f"{self.name}: {self.sample_bytes / 1e3:,.0f} KB an image; else {facts.source}",
        )


def read_manifest(path: Path) -> DatasetFacts:
    """Read a manifest.json; a ValueError says why a file is not one."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        meta: dict[str, Any] = manifest.get("meta", {})
        splits = meta.get("splits", {})
        sizes = sorted((int(file["bytes"]) for file in manifest["files"]), reverse=True)
        return DatasetFacts(
            name=str(manifest.get("name", path)),
            num_bytes=sum(sizes),
            file_bytes=tuple(sizes),
            workload=str(manifest.get("workload", "")),
            train_samples=_count(splits.get("train")),
            sample_bytes=meta.get("image_bytes"),
            sample_pixels=meta.get("image_pixels"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a dataset manifest ({error}); use the manifest.json that "
            "`python -m training data import`, `make` or `upload` wrote"
        ) from error


def _count(split: Any) -> int | None:
    """Return the number of samples of a split if the workload counts them."""
    return split if isinstance(split, int) and split > 0 else None


# gp3's highest throughput.
_GP3_MAX_MIB_PER_SECOND = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One run on one size. All fields except the first three have the stack's defaults."""

    workload: str
    recipe: str
    size: str
    micro_batch: int | None = None
    batch: int | None = None
    samples: int | None = None
    epochs: float | None = None
    gpus: int = 1
    hosts: int = 1  # machines that train one run together, each with that many GPUs
    sharded: bool = False  # parameters, gradients and optimizer are spread over them
    runs: int = 1
    data_on: str = "ebs"
    volume_gib: int | None = None  # default: 200, or the instance store's
    volume_mib_per_second: float | None = None
    root_initialization_mib_per_second: float = 0.0  # 0: the default rate, which costs nothing
    notice_seconds: float | None = None
    trains_on_at_notice: bool = True
    checkpoint_interval: str = "auto"
    dataset_gib: float | None = None
    dataset: DatasetFacts | None = None  # the facts in its manifest
    unshared_gib: float = 0.0
    rate_per_hour: float | None = None
    history: Path = HISTORY_FILE  # of the account's own pools
    pools: int = 2
    prices: PriceBook = field(default_factory=PriceBook)
    max_hours: float | None = None
    max_usd: float | None = None
    deadline_hours: float | None = None
    on_demand: bool = False

    def __post_init__(self) -> None:
        for name in ("volume_gib", "runs", "hosts", "batch", "micro_batch", "samples"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 1e12:
                raise ValueError(f"{name} is {value}; use 1 to a trillion")
        if self.data_on not in DATA_PLACES:
            raise ValueError(f"data_on is {self.data_on!r}; use {' or '.join(DATA_PLACES)}")
        if self.epochs is not None and not 0 < self.epochs < 1e9:
            raise ValueError(f"epochs is {self.epochs:g}; use a number above 0, below 1e9")
        for name in ("dataset_gib", "unshared_gib", "rate_per_hour", "volume_mib_per_second"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e6:
                raise ValueError(f"{name} is {value}; use a number from 0 to a million")
        if self.hosts > 1 and (self.ranks not in RANKS or self.runs > 1):
            raise ValueError(
                f"hosts is {self.hosts} with {self.gpus} GPUs each; use 1, 2, 4 or 8 GPUs in all, "
                "and one run"
            )
        if self.notice_seconds is not None and not 0 <= self.notice_seconds <= MAX_SECONDS:
            raise ValueError(
                f"notice_seconds is {self.notice_seconds:g}; EC2 gives at most {MAX_SECONDS}, "
                f"use 0 to {MAX_SECONDS}"
            )

    @property
    def ranks(self) -> int:
        """GPUs that share a step's batch."""
        return self.gpus * self.hosts

    @property
    def data_gib(self) -> int:
        """GiB that the data mount holds."""
        if self.data_on == "ebs":
            return self.volume_gib or 200
        # An instance store cannot be larger than it is, whatever is requested.
        store = catalogue.find(self.size).instance_store_gib
        return min(store, self.volume_gib or store)

    def find_instance(self) -> InstanceType:
        """Return the size's instance; a ValueError if it cannot train with that many GPUs."""
        instance = catalogue.find(self.size)
        if instance.num_gpus < 1:
            raise ValueError(
                f"size {self.size} has no NVIDIA GPU of its own to train on; "
                "the smallest that has one is g4dn.xlarge"
            )
        if self.data_on == "nvme" and not instance.instance_store_gb:
            raise ValueError(f"data_on is 'nvme', and {self.size} has no instance store; use ebs")
        if not 1 <= self.gpus <= instance.num_gpus:
            raise ValueError(f"gpus is {self.gpus}; {self.size} has {instance.num_gpus}")
        return instance

    def runs_per_gpu(self, instance: InstanceType) -> int:
        """Return the most runs that share a GPU: they are spread over all GPUs of the size."""
        return math.ceil(self.runs / (instance.num_gpus // self.gpus))

    def volume_mb_per_second(self, instance: InstanceType) -> float:
        """Return the volume's throughput: as set, else what the size sustains, at least gp3's."""
        if self.volume_mib_per_second:
            return self.volume_mib_per_second * MB_PER_MIB
        most = min(instance.ebs_baseline_mb_per_second, _GP3_MAX_MIB_PER_SECOND * MB_PER_MIB)
        return max(GP3_MB_PER_SECOND, most)


class IdleGpusError(ValueError):
    """More GPUs than a step has micro-batches for: the trainer would not start."""


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
    def num_files(self) -> int:
        """The number of the dataset's files; 0 where its manifest is not given."""
        return len(self.request.dataset.file_bytes) if self.request.dataset else 0

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the largest checkpoint."""
        return max(footprint.checkpoint_bytes for footprint in self.footprints)

    def first_bytes(self, stage: Footprint) -> float:
        """Return the bytes of the dataset that a stage's first step needs; all, where unknown."""
        num, dataset = stage.first_files, self.request.dataset
        if num is None:
            return self.dataset_bytes
        if dataset is not None and dataset.file_bytes:
            return min(sum(dataset.file_bytes[:num]), self.dataset_bytes)
        each = self.facts.file_bytes if self.facts else None
        return self.dataset_bytes if each is None else min(num * each, self.dataset_bytes)

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
    stages = asked_stages(request, footprints_file)
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


def asked_stages(request: Request, footprints_file: Path) -> tuple[Footprint, ...]:
    """Return the recipe's stages as the request trains them; IdleGpusError if GPUs were idle."""
    counted = footprints.counted_stages(
        request.workload,
        request.recipe,
        micro_batch=request.micro_batch,
        batch=request.batch,
        path=footprints_file,
    )
    if not footprints.are_busy(counted, request.ranks):
        raise IdleGpusError(_idle_gpus(counted, request))
    stages, ranks = _as_asked(counted, request), request.ranks
    if not request.sharded or ranks == 1:
        return stages
    return tuple(each.sharded(ranks) if each.kind == "train" else each for each in stages)


def _idle_gpus(stages: tuple[Footprint, ...], request: Request) -> str:
    ranks, busy = request.ranks, footprints.usable_gpus(stages, request.ranks)
    most = min(stage.global_batch for stage in stages if stage.kind == "train") // ranks
    smaller = f", a micro_batch of at most {most}," if most else ""
    return (
        f"a step of {request.workload}/{request.recipe} has micro-batches for {busy} of {ranks} "
        f"GPUs (gpus={request.gpus}, hosts={request.hosts}); use {busy}{smaller} or a larger batch"
    )


def _data_rate(request: Request, instance: InstanceType, constants: Constants) -> Rate:
    """Return the data mount's rate; an instance store without published figures counts as EBS."""
    if request.data_on == "nvme" and (rate := instance_store_rate(instance)) is not None:
        return rate
    return volume_rate(instance, request.volume_mb_per_second(instance), constants)


def _as_asked(stages: tuple[Footprint, ...], request: Request) -> tuple[Footprint, ...]:
    """Return the stages with the request's samples and epochs; their counts do not change.

    `samples` counts what the dataset trains: every stage keeps its share of it.
    """
    samples = request.samples or (request.dataset and request.dataset.train_samples)
    if samples is None and request.epochs is None:
        return stages
    whole = footprints.trained_samples(stages)
    share = (samples or whole) / whole
    if share == 1 and request.epochs is None:
        return stages
    return tuple(_scaled(stage, share, request.epochs) for stage in stages)


def _scaled(stage: Footprint, share: float, epochs: float | None) -> Footprint:
    trains = stage.kind == "train"
    lasts = epochs if epochs and trains else stage.epochs
    # A stage defined in steps, whose epochs are counted as a fraction, keeps its steps.
    is_of_steps = epochs is None and isinstance(stage.epochs, float)
    samples = max(1, round(stage.samples_per_epoch * share))
    evaluations = math.ceil(stage.evaluations * lasts / stage.epochs)
    return replace(
        stage,
        samples_per_epoch=samples,
        validation_samples=round(stage.validation_samples * share),
        steps_per_epoch=math.ceil(samples / (stage.global_batch if trains else stage.micro_batch)),
        epochs=lasts / share if is_of_steps else lasts,
        evaluations=evaluations,
        phases=tuple(
            replace(phase, epochs=phase.epochs * lasts / stage.epochs) for phase in stage.phases
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
    """Return those of a rate that was set, or of own history, with published ones.

    The loss of one machine interrupts a run of several: N are lost N times as often. Waiting for
    all of them at once is not counted as longer, because by how much has not been published.
    """
    found = interruptions(pools=request.pools)
    if request.rate_per_hour is not None:
        found = replace(found, rate_per_hour=request.rate_per_hour, source="given")
    else:
        found = learned(found, request.history, request.size, request.prices.zone)
    rate, published = (each * request.hosts for each in (found.rate_per_hour, found.published_rate))
    return replace(found, rate_per_hour=rate, published_rate=published)
