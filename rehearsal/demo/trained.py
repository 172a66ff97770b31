"""A workload or a program to rehearse, with its data, and the stacks' parameters for it.

A program is a folder with its files and program.json. If no data are passed, make_data.py in that
folder or the one above makes them.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from contract.description import WorkloadDescription
from contract.keys import MANIFEST
from contract.program import WORKLOAD, Program
from rehearsal.demo.actions import SNAPSHOT
from rehearsal.demo.children import Child
from rehearsal.demo.deployment import DATASET, DeployedStacks

# The stages in which it can be interrupted.
PROGRAM_STAGES = (WORKLOAD, SNAPSHOT)
_SPEC = "program.json"
_MAKER = "make_data.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedProgram:
    """A program's folder, its spec, and its data or the script that makes it."""

    folder: Path
    spec: Program
    data: Path

    @classmethod
    def from_folder(cls, folder: Path, data: Path | None) -> "RehearsedProgram":
        """Read a program's folder; raise a ValueError that says what it lacks."""
        folder = folder.resolve()
        path = folder / _SPEC
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {_SPEC}; write it, with at least "
                '{"command": "python train.py"} (docs/your-script.md)'
            )
        spec = Program.from_json(path.read_text(encoding="utf-8"), str(path))
        return cls(folder=folder, spec=spec, data=find_data(folder, data))

    @property
    def dataset(self) -> str:
        """Its folder's name."""
        return self.folder.name

    def make_data(self, stacks: DeployedStacks) -> Child | None:
        """Copy the data, or start making it; do not wait."""
        if self.data.is_file():
            return stacks.start_python("dataset", str(self.data), str(stacks.dataset))
        # A copy, as the user may go on working in the folder.
        shutil.copytree(self.data, stacks.dataset)
        return None

    def context(self) -> dict[str, str]:
        """Return the stack's parameters."""
        return {"program": str(self.folder / _SPEC), "dataset": self.dataset}

    def start_reference(self, stacks: DeployedStacks, folder: Path) -> Child:
        """Start the uninterrupted run in a folder; do not wait."""
        return stacks.start_python(
            "uninterrupted",
            *("-m", "training", "run", "--program-file", str(self.folder / _SPEC)),
            *("--source", str(self.folder), "--dataset-uri", str(stacks.dataset)),
            *("--run-uri", str(folder), "--ml-root", str(folder.with_name("uninterrupted-ml"))),
        )


def find_data(folder: Path, data: Path | None) -> Path:
    """Return the folder of the data that a source folder trains on, or the script that makes it."""
    if data is not None:
        given = data.resolve()
        if not given.is_dir():
            raise ValueError(f"{given} is not a folder; --data takes the folder of your data")
        return given
    for maker in (folder / _MAKER, folder.parent / _MAKER):
        if maker.is_file():
            return maker
    raise ValueError(
        f"no data found for {folder}; pass their folder (--data, with make DATA=), or put a "
        f"{_MAKER} into it"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoDefaults:
    """A workload's defaults: make `count` samples, interrupt as in `interruptions`, in order."""

    count: int
    checkpoint_interval: str
    interruptions: tuple[str, ...]
    recipe: str = "laptop"
    data: tuple[str, ...] = ()  # options of `data make`
    global_batch: int = 16  # the recipe's, which is split among the ranks of several hosts


# After a notice, training may continue to the end of its stage, so another stage is for the kill.
DEFAULTS: Mapping[str, DemoDefaults] = MappingProxyType(
    {
        "trajectory": DemoDefaults(
            count=264,
            checkpoint_interval="2epochs",
            interruptions=("notice:tracker:60", "kill:head:60"),
            recipe="demo",
            data=("--override", "validation_share=0.3"),
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
            global_batch=4,
        ),
    }
)
# All that is known of a program's progress is its snapshots, and these may be few: each machine
# that is taken away has made one.
PROGRAM_INTERRUPTIONS = ("kill:snapshot:1", "notice:snapshot:2")
_USUAL_COUNT = 1000
_USUAL_STEPS = 12


def own_defaults(described: WorkloadDescription) -> DemoDefaults:
    """Return the defaults for a user's own workload: its last stage loses two machines."""
    stage, steps = list(described.stages.items())[-1]
    steps = steps or _USUAL_STEPS
    return DemoDefaults(
        count=described.num_samples or _USUAL_COUNT,
        checkpoint_interval="2epochs",
        interruptions=(f"kill:{stage}:{max(1, steps // 3)}", f"notice:{stage}:{steps * 2 // 3}"),
    )


def by_workload(field: str) -> str:
    """Return each workload's default for a field, for --help."""
    shown = {name: getattr(defaults, field) for name, defaults in DEFAULTS.items()}
    words = {n: v if not isinstance(v, tuple) else " ".join(v) for n, v in shown.items()}
    return "default: " + ", ".join(f"{value} for {name}" for name, value in words.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedWorkload:
    """A workload with its recipe, its data and its checkpoint interval."""

    name: str
    recipe: str
    overrides: str
    count: int
    checkpoint_interval: str
    source: Path | None = None  # the folder of a user's own workload
    data: Path | None = None  # the folder of its data, or the script that makes them
    data_options: Sequence[str] = ()
    imports_data: bool = True

    @property
    def dataset(self) -> str:
        """Its prefix in the dataset bucket."""
        return self.name if self.source is None else self.source.name

    def context(self) -> dict[str, str]:
        """Return the stack's parameters."""
        return {
            "workload": self.name,
            "recipe": self.recipe,
            "overrides": self.overrides,
            "train.checkpoint_interval": self.checkpoint_interval,
            **({"source": str(self.source)} if self.source else {}),
        }

    def make_data(self, stacks: DeployedStacks) -> Child | None:
        """Start making the dataset; do not wait."""
        if self.data is None:
            count = str(self.count)
            return self._start_data(stacks, "make", "--count", count, *self.data_options)
        brought = self.data
        if brought.is_file():
            brought = stacks.folder / "brought"
            stacks.start_python("data", str(self.data), str(brought)).expect()
        # Files that are in no folder are in no class either.
        is_plain = not self.imports_data and not any(path.is_dir() for path in brought.iterdir())
        if is_plain or (brought / MANIFEST).is_file():
            shutil.copytree(brought, stacks.dataset)
            return None
        return self._start_data(stacks, "import", str(brought))

    def _start_data(self, stacks: DeployedStacks, act: str, *options: str) -> Child:
        return stacks.start_python(
            "dataset",
            *("-m", "training", "data", act, *options),
            *("--workload", self.name, "--out", str(stacks.dataset)),
            PYTHONPATH=str(self.source or ""),
        )

    def start_reference(self, stacks: DeployedStacks, folder: Path) -> Child:
        """Start the uninterrupted run in a folder; do not wait."""
        words = [word for pair in self.overrides.split() for word in ("--override", pair)]
        words += ["--source", str(self.source)] if self.source else []
        return stacks.start_python(
            "uninterrupted",
            *("-m", "training", "run", "--workload", self.name, "--recipe", self.recipe, *words),
            *("--dataset-uri", str(stacks.dataset), "--run-uri", str(folder)),
            *("--checkpoint-interval", self.checkpoint_interval),
        )


def prepare(
    stacks: DeployedStacks,
    trained: RehearsedWorkload,
    synthesis: Child,
    assembly: Path,
    notice_seconds: float,
) -> None:
    """Deploy the stacks that all runs share, upload the dataset; `synthesis` makes the assembly."""
    making = trained.make_data(stacks)
    stacks.bootstrap()
    synthesis.expect()
    stacks.deploy(assembly, DATASET)
    if making is not None:
        making.expect()
    stacks.upload(trained.dataset).expect()
    stacks.aws.capacity.notice_seconds = notice_seconds


def stack_context(
    trained: Mapping[str, str], *, size: str, notice_seconds: float, lease_ttl_seconds: float
) -> dict[str, str]:
    """Return the parameters of a stack for a short run; `trained` are those of what it trains."""
    return {
        "size": size,
        **trained,
        "notice_budget_seconds": f"{notice_seconds:g}",
        "train.lease_ttl_seconds": f"{lease_ttl_seconds:g}",
    }
