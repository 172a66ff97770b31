"""The options of one attempt of a program (`ProgramOptions`), and the command that it starts."""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.program import Program
from contract.run_env import NAMES
from training.durable.attempt.attempt import AttemptOptions
from training.durable.attempt.ranks import Hosts
from training.durable.program.container import (
    SAGEMAKER_ROOT,
    Container,
    ContainerHost,
    command_arguments,
)
from training.durable.program.process import resolve_command

# Where `from training import commit` is found.
_BUNDLE_FOLDER = str(Path(__file__).parents[3])
_SM_VARIABLE = re.compile(r"\$(?:\{(SM_[^}]*)\}|(SM_\w+))")
# Variables for this process alone: its service's, its launcher's, and the stack's decisions.
_OWN = re.compile(
    r"(TRAINING|SM|LISTEN|SYSTEMD)_.*|NOTIFY_SOCKET|WATCHDOG_(PID|USEC)|INVOCATION_ID|"
    r"JOURNAL_STREAM|PYTHON(PATH|HOME|STARTUP)|RANK|LOCAL_RANK|WORLD_SIZE|INSTANCE_ID"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOptions(AttemptOptions):
    """The command line's options for one attempt of a program."""

    program: Program
    source: Path
    dataset_uri: str | None
    root: Path  # of the container contract
    interpreter: str = ""  # wins over the program's
    instance_type: str = "local"
    hosts: Hosts | None = None  # that each run the program; the first one's checkpoints are kept

    @staticmethod
    def usual_root(scratch: Path) -> Path:
        """SageMaker's folder if this machine has it, else one in `scratch`."""
        return SAGEMAKER_ROOT if SAGEMAKER_ROOT.is_dir() else scratch / "ml"

    def identity(self, source: str) -> dict[str, Any]:
        """The `config` of config.json; `source` is the checksum of the source folder."""
        program = self.program
        return {
            **asdict(program),
            "channels": list(program.channels),
            "metric_definitions": [list(pair) for pair in program.metric_definitions],
            "source_sha256": source,
        }

    @property
    def container(self) -> Container:
        """The folders of the program."""
        return Container(root=self.root)

    @property
    def notice_file(self) -> Path:
        """The file that tells the program of a notice."""
        return self.root / "notice.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    """The command to start: words, folder, environment."""

    words: tuple[str, ...]
    folder: Path
    variables: Mapping[str, str]


def build_command(
    options: ProgramOptions,
    host: ContainerHost,
    channels: tuple[str, ...],
    environ: Mapping[str, str],
) -> _Command:
    """Build the program's command, and check it."""
    program, container = options.program, options.container
    interpreter = _interpreter(options.interpreter or program.interpreter)
    contract = container.variables(program, host, options.run_id, channels)
    path = os.pathsep.join([str(Path(interpreter).parent), environ.get("PATH", os.defpath)])
    variables = {
        **{name: value for name, value in environ.items() if not _is_own(name)},
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        **program.environment,
        **contract,
        "TRAINING_NOTICE_FILE": str(options.notice_file),
        # Ours comes last: what the program brings is found first.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [program.environment.get("PYTHONPATH", ""), _BUNDLE_FOLDER])
        ),
    }
    words = [_expanded(word, contract) for word in program.words]
    if words[0] in ("python", "python3"):
        words[0] = interpreter
    folder = container.code / program.working_folder
    resolve_command(words, folder, variables["PATH"])
    return _Command(
        words=(*words, *command_arguments(program.hyperparameters)),
        folder=folder,
        variables=variables,
    )


def _is_own(name: str) -> bool:
    is_decision = name in NAMES and name != "AWS_REGION"
    return is_decision or _OWN.fullmatch(name) is not None


def _expanded(word: str, contract: Mapping[str, str]) -> str:
    """Replace SM_ variables by their values; any other dollar sign stays."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in contract:
            raise UserError(
                f"the command uses ${name}, which is not part of the container contract; "
                "docs/container-contract.md lists its variables"
            )
        return contract[name]

    return _SM_VARIABLE.sub(value, word)


def _interpreter(given: str) -> str:
    """Return an absolute path to Python."""
    if not given:
        return sys.executable
    found = shutil.which(given)
    if found is None:
        raise UserError(
            f"the interpreter {given!r} is not found on this machine, or is not executable; "
            "leave it out for the one that this project runs on, or pass its path"
        )
    return str(Path(found).absolute())
