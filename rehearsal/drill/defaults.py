"""What a demo does unless told otherwise, by workload: its data, its commits, its interruptions."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoDefaults:
    """`count` samples are made; the run is interrupted as `interruptions` say, in this order."""

    count: int
    checkpoint_interval: str
    interruptions: tuple[str, ...]


# After a notice training continues at most to the end of its stage: one stage is left to kill in.
DEFAULTS: Mapping[str, DemoDefaults] = MappingProxyType(
    {
        "trajectory": DemoDefaults(
            count=900,
            checkpoint_interval="2epochs",
            interruptions=("kill:features:5", "notice:shuffled:60", "kill:head:120"),
        ),
        "growth": DemoDefaults(
            count=12000,
            checkpoint_interval="40steps",
            interruptions=("kill:dense:100", "notice:experts:60", "kill:grown:60"),
        ),
        "imagenet": DemoDefaults(
            count=1200,
            checkpoint_interval="40steps",
            interruptions=("kill:classifier:70", "kill:classifier:170", "notice:classifier:250"),
        ),
        "detection": DemoDefaults(
            count=60,
            checkpoint_interval="8steps",
            interruptions=("kill:detect:20", "notice:detect:40", "kill:detect:110"),
        ),
    }
)
# Of a program nobody here knows more than its snapshots.
PROGRAM_INTERRUPTIONS = ("kill:snapshot:2", "notice:snapshot:5")
# A workload of one's own: nobody here knows its stages.
UNKNOWN = DemoDefaults(count=1000, checkpoint_interval="2epochs", interruptions=())


def defaults_of(workload: str) -> DemoDefaults:
    """The defaults of a workload by name."""
    return DEFAULTS.get(workload, UNKNOWN)


def by_workload(field: str) -> str:
    """A default of each workload, for --help."""
    shown = {name: getattr(defaults, field) for name, defaults in DEFAULTS.items()}
    words = {n: v if not isinstance(v, tuple) else " ".join(v) for n, v in shown.items()}
    return "default: " + ", ".join(f"{value} for {name}" for name, value in words.items())
