"""What a stage's time went into, and in one sentence what it was bound by. Pure functions.

A loader that keeps up has its batches ready: without waiting, data is not the bottleneck. What the
trainer waits for, the work of the loader's processes tells.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from training.report.progress import readable

_Bound: TypeAlias = Literal["GPU", "CPU", "host", "decode", "make", "disk", "network"]

# Waiting for data that costs less than this is nobody's bottleneck.
_WAITED_SHARE = 0.05
# Workers that do less have batches ready: steps are too short for what handing one over takes.
_BUSY_SHARE = 0.5
_BOUND_OF: Mapping[str, _Bound] = {
    "sync": "network",
    "read": "disk",
    "decode": "decode",
    "make": "make",
}
_WHAT: Mapping[_Bound, str] = {
    "GPU": "the GPU",
    "CPU": "the CPU's arithmetic",
    "host": "the host",
    "decode": "decoding",
    "make": "making samples",
    "disk": "the disk",
    "network": "the network, through the sync",
}
_ADVICE: Mapping[_Bound, str] = {
    "GPU": "A faster GPU or less work per sample would change it; more vCPUs, a faster disk or "
    "network would not.",
    "CPU": "A GPU or more threads would change it; a faster disk or network would not.",
    "host": "Larger micro-batches or compile_mode would change it: a step then has more to do.",
    "decode": "More vCPUs per GPU (another size) or smaller images (resized when they are packed) "
    "would change it.",
    "make": "More vCPUs per GPU (another size) or less work in the samples' `get` and `collate` "
    "would change it.",
    "disk": "A volume of more throughput, instance-store NVMe, memory that holds the dataset or "
    "smaller samples would change it.",
    "network": "A size with more network bandwidth or a smaller dataset would change it; once the "
    "sync is complete, nothing waits for it.",
}
_ALONE = "Loader workers (loader_workers=auto) would make batches while the device computes."


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Where the time of a stage's steps went, over all attempts, as rank 0 measured it.

    The first step of an attempt is left out: it compiles, and its queues are empty. `*_seconds` of
    the loader are added up over its workers, or are the trainer's own if there are none.
    """

    samples: float = 0.0
    seconds: float = 0.0  # of the steps; evaluations and commits are no part of it
    waited_seconds: float = 0.0  # of these, for data
    computed_seconds: float = 0.0  # of these, the device worked on steps
    first_waited_seconds: float = 0.0  # before the first step of each attempt
    loader_seconds: float = 0.0  # that the workers had: their number x seconds
    sync_seconds: float = 0.0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    make_seconds: float = 0.0

    def plus(self, **more: float) -> "StageTimes":
        """These times and more of them."""
        return StageTimes(
            **{f.name: getattr(self, f.name) + more.pop(f.name, 0.0) for f in fields(self)}, **more
        )

    @property
    def starved_seconds(self) -> float:
        """The device's, for data: on a GPU the trainer may wait while steps are computed."""
        return min(self.waited_seconds, self.seconds - self.computed_seconds)

    @property
    def by_part(self) -> dict[str, float]:
        """The loader's seconds by what it did."""
        return {part: getattr(self, f"{part}_seconds") for part in _BOUND_OF}

    def to_json(self) -> dict[str, float]:
        """Rounded to microseconds."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


def bottleneck(times: StageTimes, device: str) -> _Bound | None:
    """What bounds the steps on a device ("cuda" or "cpu"); None before there are two steps."""
    if not times.seconds:
        return None
    parts = times.by_part
    is_loader_busy = sum(parts.values()) >= _BUSY_SHARE * times.loader_seconds
    # A CPU that makes its batches itself does nothing meanwhile: the larger part bounds it.
    is_by_turns = device == "cpu" and not times.loader_seconds
    least = times.computed_seconds if is_by_turns else _WAITED_SHARE * times.seconds
    if times.starved_seconds >= least and is_loader_busy:
        return _BOUND_OF[max(parts, key=lambda part: parts[part])]
    if times.computed_seconds < 0.5 * times.seconds:
        return "host"
    return "GPU" if device == "cuda" else "CPU"


def sentence(stage: str, times: StageTimes, device: str) -> str | None:
    """The bottleneck with the figures that say so, and what would change it."""
    bound = bottleneck(times, device)
    if bound is None:
        return None
    seconds = times.seconds
    text = (
        f"stage {stage!r} is bound by {_WHAT[bound]}: of the time of its steps "
        f"{times.computed_seconds / seconds:.0%} were computing and "
        f"{times.starved_seconds / seconds:.0%} waiting for data, at "
        f"{readable(times.samples / seconds)} samples/s. {_loader(times)}"
    )
    if times.first_waited_seconds >= max(1.0, 0.01 * seconds):
        text += f" Before the first steps {times.first_waited_seconds:.0f} s were waited for data."
    is_alone = not times.loader_seconds and times.starved_seconds >= _WAITED_SHARE * seconds
    return f"{text} {_ALONE if is_alone else _ADVICE[bound]}"


def _loader(times: StageTimes) -> str:
    """What the loader did, and what it could do."""
    parts = {part: seconds for part, seconds in times.by_part.items() if seconds}
    total = sum(parts.values())
    if not total:
        return "The loader was idle."
    named = {
        "sync": "waiting for the sync",
        "read": "reading",
        "decode": "decoding",
        "make": "the rest",
    }
    shares = ", ".join(f"{seconds / total:.0%} {named[part]}" for part, seconds in parts.items())
    if not times.loader_seconds:
        return f"The trainer made its batches itself ({shares})."
    workers = times.loader_seconds / times.seconds
    busy = min(1.0, total / times.loader_seconds)
    could = readable(times.samples / times.seconds / busy)
    return (
        f"{workers:.2g} loader worker{' was' if workers == 1 else 's were'} busy {busy:.0%} of it "
        f"({shares}) and could make {could} samples/s."
    )


def longest(times: Mapping[str, Mapping[str, Any]]) -> tuple[str, StageTimes] | None:
    """The stage that took the most time, of what `to_json` gave by stage."""
    of_stage = {stage: StageTimes(**numbers) for stage, numbers in times.items()}
    if not of_stage:
        return None
    return max(of_stage.items(), key=lambda one: one[1].seconds)
