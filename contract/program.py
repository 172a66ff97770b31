"""A program: a training script that knows nothing of this project, with its command line.

On an instance it is program/program.json of the bundle, next to its source in program/source/.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any

from contract.errors import UserError

# Paths in a stack's bundle, and the workload's name in run.env and config.json.
PROGRAM_FILE = "program/program.json"
SOURCE_FOLDER = "program/source"
# Names of folders that an archive of files alone lacks.
EMPTY_FOLDERS = "program/empty_folders.json"
WORKLOAD = "program"
# The metrics that are the loss of a step, the first that it has.
LOSSES = ("loss", "train_loss", "train:loss", "train/loss")

NOTICE_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "none")
# Installed if the source has it; a file of another name must exist.
USUAL_REQUIREMENTS = "requirements.txt"
# Fields that may differ between a run's attempts: they do not affect what is computed or, like the
# requirements, name a file of the source, whose checksum is compared.
PLACEMENT = frozenset(
    {
        *("interpreter", "notice_signal", "quiet_seconds", "metric_definitions", "requirements"),
        "certificate",
    }
)

_FORMAT = 1
# The limits of SageMaker's CreateTrainingJob.
_MOST_CHANNELS = 20
_MOST_DEFINITIONS = 40
_MOST_REGEX = 500
_MOST_VALUE = 2500
_CHANNEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HYPERPARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELL_WORDS = frozenset({"|", "||", "&&", "&", ";", "<", ">", ">>", "2>&1", "2>", "&>"})
# Variables of the contract, of the machine's role and of its service.
_OURS = re.compile(r"(SM|TRAINING|SAGEMAKER)_.*|CURRENT_HOST|NOTIFY_SOCKET|WATCHDOG_USEC")
_ADDRESS_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:(?!\$)[^/\s@]+@")
_SECRET = re.compile(r"(.*_)?(KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The command to start, and how it learns of its machine's end; UserError if invalid."""

    command: str  # split as a POSIX shell does; no shell runs it
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    channels: tuple[str, ...] = ("training",)  # one: the whole dataset; several: its folders
    working_folder: str = "."  # within the source folder
    # Files and folders below the working folder that are saved like the checkpoint folder.
    keep: tuple[str, ...] = ()
    requirements: str = USUAL_REQUIREMENTS  # a file of the source that the boot installs; "": none
    interpreter: str = ""  # what `python` in the command is; "": the one that runs this project
    notice_signal: str = "SIGTERM"
    quiet_seconds: float = 10.0  # seconds without a write before the folder is snapshotted
    metric_definitions: tuple[tuple[str, str], ...] = ()  # (name, regular expression)
    # The URI of another run of a program, with whose newest snapshot this run begins.
    init_from: str = ""

    def __post_init__(self) -> None:
        _check_command(self.command)
        for name, value in self.hyperparameters.items():
            _check_hyperparameter(name, value)
        for name, value in self.environment.items():
            _check_variable(name, value)
        _check_channels(self.channels)
        _check_below("the working folder", self.working_folder, "the source folder")
        for name in self.keep:
            _check_below("the path to keep", name, "the working folder")
        if re.search(r"[\s\0]", self.interpreter):
            raise UserError(
                f"the interpreter {self.interpreter!r} is not a single word; use a path or a name"
            )
        if self.notice_signal not in NOTICE_SIGNALS:
            raise UserError(
                f"the notice signal {self.notice_signal!r} is unknown; "
                f"use one of {', '.join(NOTICE_SIGNALS)}"
            )
        if not 0 < self.quiet_seconds < math.inf:
            raise UserError(f"quiet_seconds is {self.quiet_seconds}; use a number above 0")
        _check_definitions(self.metric_definitions)

    @property
    def words(self) -> tuple[str, ...]:
        """The command's words."""
        return tuple(shlex.split(self.command))

    def to_json(self) -> str:
        """The content of program.json."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "program.json") -> "Program":
        """Read what `to_json` returned or a person wrote; only `command` is required."""
        try:
            record = json.loads(text)
            json.dumps(record, ensure_ascii=False).encode()  # half of a pair, \ud800, is no text
        except ValueError as error:
            raise UserError(f"{name} is not JSON ({error}); correct it") from error
        if not isinstance(record, dict):
            raise UserError(f'{name} is not a JSON object; write {{"command": "python train.py"}}')
        number = record.pop("format", _FORMAT)
        if number != _FORMAT:
            raise UserError(f"{name} has format {number!r}, but this version knows {_FORMAT}")
        if "command" not in record:
            raise UserError(f'{name} has no "command"; add "command": "python train.py"')
        known = [one.name for one in fields(cls)]
        for key, value in record.items():
            if key not in known:
                raise UserError(f"{name} has {key!r}, which is unknown; known: {', '.join(known)}")
            record[key] = _typed(name, key, value)
        return cls(**record)


def _typed(name: str, key: str, value: Any) -> Any:
    """Return a field's value in the type of the class; UserError for any other type."""
    if key == "quiet_seconds":
        if type(value) in (int, float):
            return float(value)
        wanted = "a number"
    elif key in ("hyperparameters", "environment"):
        if isinstance(value, dict):
            return {
                one: text if isinstance(text, str) else json.dumps(text)
                for one, text in value.items()
            }
        wanted = "an object of names and values"
    elif key in ("channels", "keep"):
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        wanted = "a list of names"
    elif key == "metric_definitions":
        pairs = [_pair(one) for one in value] if isinstance(value, list) else [None]
        if all(pair and [*map(type, pair)] == [str, str] for pair in pairs):
            return tuple(pairs)
        wanted = 'a list of {"Name": ..., "Regex": ...} or [name, regular expression]'
    else:
        if isinstance(value, str):
            return value
        wanted = "a string"
    raise UserError(f"{name} has {key} {json.dumps(value)}; use {wanted}")


def _pair(definition: Any) -> tuple[Any, ...]:
    """Return a metric definition's parts, whether in SageMaker's form or in ours; () if neither."""
    if isinstance(definition, dict) and definition.keys() == {"Name", "Regex"}:
        return definition["Name"], definition["Regex"]
    return tuple(definition) if isinstance(definition, list) else ()


def _check_command(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"the program {command!r} cannot be split into words: {error}") from error
    if not words or not words[0]:
        raise UserError("the program is empty; give its command line, such as 'python train.py'")
    _check_text("the program", command)
    for word in words:
        if word in _SHELL_WORDS or (len(word) > 1 and word.endswith(";")):
            raise UserError(
                f"the program has {word!r}, which only a shell understands, but no shell runs it; "
                f"write: bash -eo pipefail -c {shlex.quote(command)}"
            )
    if re.fullmatch(_VARIABLE.pattern + "=.*", words[0]):
        raise UserError(
            f"the program begins with {words[0]!r}; pass environment variables separately "
            '(--env NAME=VALUE, or "environment" in program.json)'
        )


def _check_hyperparameter(name: str, value: str) -> None:
    if not _HYPERPARAMETER.fullmatch(name):
        raise UserError(
            f"the hyperparameter {name!r} is not a valid name; use letters, digits, _, - and dots, "
            "a letter or _ first"
        )
    if name.startswith("sagemaker_"):
        raise UserError(f"the hyperparameter {name!r} is reserved by SageMaker; rename it")
    _check_value(f"the hyperparameter {name!r}", value)


def _check_variable(name: str, value: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise UserError(
            f"the environment variable {name!r} is not a valid name; use letters, digits and _"
        )
    if _OURS.fullmatch(name):
        raise UserError(
            f"the environment variable {name!r} belongs to the container contract; "
            "rename it, or pass a hyperparameter"
        )
    if _SECRET.fullmatch(name):
        raise UserError(
            f"the environment variable {name!r} looks like a secret, which would be stored in the "
            "run's config.json; keep it in AWS Secrets Manager and let the program read it there"
        )
    _check_value(f"the environment variable {name!r}", value)


def _check_text(what: str, value: str) -> None:
    if "\0" in value:
        raise UserError(f"{what} has a zero byte; remove it")
    if _ADDRESS_WITH_PASSWORD.search(value):
        raise UserError(
            f"{what} has an address with a password in it, which would be stored in the run's "
            "config.json; keep it in AWS Secrets Manager and let the program read it there"
        )


def _check_value(what: str, value: str) -> None:
    _check_text(what, value)
    if len(value) > _MOST_VALUE:
        raise UserError(
            f"{what} has {len(value)} characters; pass at most {_MOST_VALUE}, or a file"
        )


def _check_channels(channels: tuple[str, ...]) -> None:
    if not 1 <= len(channels) <= _MOST_CHANNELS:
        raise UserError(f"there are {len(channels)} channels; give 1 to {_MOST_CHANNELS}")
    for name in channels:
        if not _CHANNEL.fullmatch(name) or name in (".", ".."):
            raise UserError(
                f"the channel {name!r} is not a valid name; use up to 64 letters, digits, _, - "
                "and dots"
            )
    if len({name.upper() for name in channels}) < len(channels):
        raise UserError(
            f"two of the channels {', '.join(channels)} have the same name; the case of letters "
            "does not count, as in SM_CHANNEL_TRAINING"
        )


def _check_below(what: str, name: str, folder: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or name[0] in "~$":
        raise UserError(f"{what} {name!r} is not within {folder}; give a relative path")


def _check_definitions(definitions: tuple[tuple[str, str], ...]) -> None:
    if len(definitions) > _MOST_DEFINITIONS:
        raise UserError(
            f"there are {len(definitions)} metric definitions; use at most {_MOST_DEFINITIONS}"
        )
    for name, pattern in definitions:
        if not re.fullmatch(r"[^\s=][^=\n\0]{0,254}", name):
            raise UserError(
                f"the metric {name!r} is not a valid name; use 1 to 255 characters without ="
            )
        try:
            num_groups = re.compile(pattern).groups
        except re.error as error:
            raise UserError(
                f"the metric {name!r} has the regular expression {pattern!r}, which is not valid: "
                f"{error}"
            ) from error
        if num_groups < 1 or len(pattern) > _MOST_REGEX:
            raise UserError(
                f"the metric {name!r} has the regular expression {pattern!r}; put the number in "
                f"parentheses, as in 'loss: ([0-9.]+)', in at most {_MOST_REGEX} characters"
            )
