"""What one attempt of a program is asked for, and what stands about it in config.json."""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import training
from contract.program import WORKLOAD, Program
from contract.run_env import NAMES
from training.errors import UserError
from training.program.container import Container, Machine, command_arguments
from training.program.process import resolve_command
from training.record.retention import KEEP_NEWEST, Retention
from training.record.run_config import RunConfig, now_utc
from training.store.protocol import Store

_SM_VARIABLE = re.compile(r"\$(?:\{(SM_[^}]*)\}|(SM_\w+))")
# This process's own: its service's, its launcher's, and the stack's decisions for it.
_OWN = re.compile(
    r"(TRAINING|SM|LISTEN|SYSTEMD)_.*|NOTIFY_SOCKET|WATCHDOG_(PID|USEC)|INVOCATION_ID|"
    r"JOURNAL_STREAM|PYTHON(PATH|HOME|STARTUP)|RANK|LOCAL_RANK|WORLD_SIZE|INSTANCE_ID"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOptions:
    """What the command line decides about one attempt of a program."""

    program: Program
    source: Path
    dataset_uri: str | None
    store: Store
    run_id: str
    root: Path  # of the container contract
    scratch: Path
    writer: str
    interpreter: str = ""  # wins over the program's
    instance_type: str = "local"
    retention: Retention = KEEP_NEWEST
    lease_ttl_seconds: float = 30.0
    metrics_file: Path | None = None
    bundle_uri: str | None = None
    prediction: Mapping[str, float | str] | None = None
    usd_per_hour: float | None = None

    @property
    def container(self) -> Container:
        """The folders of the program."""
        return Container(root=self.root)

    @property
    def notice_file(self) -> Path:
        """What tells the program of a notice."""
        return self.root / "notice.json"

    def identity(self, source_sha256: str) -> dict[str, Any]:
        """The `config` of config.json."""
        record = asdict(self.program)
        return {
            **record,
            "channels": list(self.program.channels),
            "metric_definitions": [list(pair) for pair in self.program.metric_definitions],
            "source_sha256": source_sha256,
        }

    def run_config(self, source_sha256: str, dataset: str) -> RunConfig:
        """What config.json says of the run, if this is its first attempt."""
        return RunConfig(
            run_id=self.run_id,
            workload=WORKLOAD,
            recipe=WORKLOAD,
            overrides={},
            config=self.identity(source_sha256),
            dataset=dataset,
            bundle_uri=self.bundle_uri,
            numerics_key={},
            writer=self.writer,
            created_at=now_utc(),
            prediction=self.prediction,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What is started: words, folder, environment."""

    words: tuple[str, ...]
    folder: Path
    variables: Mapping[str, str]


def build_command(
    options: ProgramOptions,
    machine: Machine,
    channels: tuple[str, ...],
    files: Mapping[str, Path],
    environ: Mapping[str, str],
) -> Command:
    """The program's command, checked; `files` are our own variables that name a file each."""
    program, container = options.program, options.container
    interpreter = _interpreter(options.interpreter or program.interpreter)
    contract = container.variables(program, machine, options.run_id, channels)
    path = os.pathsep.join([str(Path(interpreter).parent), environ.get("PATH", os.defpath)])
    variables = {
        **{name: value for name, value in environ.items() if not _is_own(name)},
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        **program.environment,
        **contract,
        **{name: str(file) for name, file in files.items()},
        # Last: what the program brings is found first.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [program.environment.get("PYTHONPATH", ""), _bundle_folder()])
        ),
    }
    words = [_expanded(word, contract) for word in program.words]
    if words[0] in ("python", "python3"):
        words[0] = interpreter
    folder = container.code / program.working_folder
    resolve_command(words, folder, variables["PATH"])
    return Command(
        words=(*words, *command_arguments(program.hyperparameters)),
        folder=folder,
        variables=variables,
    )


def _is_own(name: str) -> bool:
    is_decision = name in NAMES and name != "AWS_REGION"
    return is_decision or _OWN.fullmatch(name) is not None


def _expanded(word: str, contract: Mapping[str, str]) -> str:
    """The word with the values of SM_ variables; any other dollar stands as it is."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in contract:
            raise UserError(
                f"the program has ${name}, which the container contract does not have; "
                "docs/container-contract.md lists its variables"
            )
        return contract[name]

    return _SM_VARIABLE.sub(value, word)


def _interpreter(given: str) -> str:
    """An absolute path to Python."""
    if not given:
        return sys.executable
    found = shutil.which(given)
    if found is None:
        raise UserError(
            f"the interpreter {given!r} is not found on this machine, or is not executable; "
            "leave it out for the one that this project runs on, or give its path"
        )
    return str(Path(found).absolute())


def _bundle_folder() -> str:
    """The folder that `from training.program import commit` is found in."""
    return str(Path(training.__file__).parent.parent)
