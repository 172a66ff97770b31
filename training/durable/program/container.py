"""The input of a program: its options, and SageMaker's container contract.

The contract is the folders below one root, their files, the SM_* variables and the arguments;
tests/training/durable/program/test_container.py compares them with the documented list.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contract.certificate import certified
from contract.errors import UserError
from contract.program import Program
from contract.run_env import NAMES
from training.durable.attempt.attempt import AttemptOptions
from training.durable.attempt.ranks import Hosts
from training.durable.errors import MachineError
from training.durable.program.process import resolve_command
from training.durable.save.snapshots.listing import Mirrored, Root
from training.durable.store.folder import write_whole
from training.durable.store.local_dataset import kept_beside

SAGEMAKER_ROOT = Path("/opt/ml")
_LOCK, _RUN = ".lock", ".run"
_ALONE = Hosts(names=("algo-1",), own="algo-1")
_GROUP = "homogeneousCluster"
_NVIDIA_SMI_SECONDS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerHost:
    """The machine as a program sees it."""

    num_gpus: int
    num_cpus: int
    instance_type: str = "local"
    hosts: Hosts = _ALONE

    @classmethod
    def here(cls, instance_type: str = "local", hosts: Hosts | None = None) -> "ContainerHost":
        """Describe this machine as SageMaker's toolkit counts: nvidia-smi's GPUs, usable CPUs."""
        return cls(
            num_gpus=_num_gpus(),
            num_cpus=len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1,
            instance_type=instance_type,
            hosts=hosts or _ALONE,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """The folders of one program's run; SageMaker's root is /opt/ml."""

    root: Path

    @property
    def code(self) -> Path:
        """A copy of the source folder; the program starts in it."""
        return self.root / "code"

    @property
    def checkpoints(self) -> Path:
        """The folder that is mirrored, and restored on another machine."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The folder of the program's result."""
        return self.root / "model"

    @property
    def output(self) -> Path:
        """The folder of `failure`, `data` and `intermediate`."""
        return self.root / "output"

    @property
    def config(self) -> Path:
        """hyperparameters.json, resourceconfig.json, inputdataconfig.json."""
        return self.root / "input" / "config"

    def channel(self, name: str) -> Path:
        """The folder of one channel's files."""
        return self.root / "input" / "data" / name

    def prepare(self, program: Program, host: ContainerHost, dataset: Path | None) -> None:
        """Make every folder except the checkpoints as on a new machine; write the config files.

        UserError if the dataset has no folder for a channel.
        """
        for folder in (self.root / "input", self.model, self.output):
            if folder.is_symlink():  # the program's, to where there is more room
                folder.unlink()
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (
            *(self.config, self.root / "input" / "data", self.checkpoints, self.model),
            *(self.output / "data", self.output / "intermediate"),
        ):
            folder.mkdir(parents=True, exist_ok=True)
        if dataset is not None:
            for name, source in _channel_folders(program.channels, dataset).items():
                self.channel(name).symlink_to(source.absolute(), target_is_directory=True)
        files = {
            "hyperparameters.json": _encoded(program.hyperparameters),
            "resourceconfig.json": _resources(host),
            "inputdataconfig.json": _inputs(program.channels if dataset else ()),
        }
        for name, content in files.items():
            (self.config / name).write_text(json.dumps(content))

    def view(self, dataset: Path | None) -> Sequence[Path]:
        """Return the folder of the data, a new one for what the program changes there, and what is
        kept beside the data, which the program does not see.

        None if this root or another file system is mounted in it, which a view would hide.
        """
        folder, changes = (dataset or self.root).resolve(), self.root / "input" / "changes"
        inside = [self.root.resolve()]
        with contextlib.suppress(OSError):
            mounts = Path("/proc/self/mountinfo").read_text().splitlines()
            inside += [Path(one.split()[4].encode().decode("unicode_escape")) for one in mounts]
        if any(one.is_relative_to(folder) and one != folder for one in inside) or dataset is None:
            return ()
        for name in ("upper", "work"):  # whoever is not root cannot remove the latter
            (changes / name).mkdir(parents=True, exist_ok=True)
        shutil.copystat(folder, changes / "upper")
        return folder, changes, *kept_beside(folder)

    def variables(
        self, program: Program, host: ContainerHost, job_name: str, channels: Sequence[str]
    ) -> dict[str, str]:
        """The variables that the toolkit sets in SageMaker's containers, and SM_CHECKPOINT_DIR."""
        values = self._environment(program, host, job_name, channels)
        only_in_training_env = (
            *("additional_framework_parameters", "channel_input_dirs", "distribution_hosts"),
            *("hyperparameters", "is_master", "is_modelparallel_enabled", "job_name"),
            "master_hostname",
        )
        named = {name: v for name, v in values.items() if name not in only_in_training_env}
        named |= {
            "channels": sorted(channels),
            "checkpoint_dir": str(self.checkpoints),
            "framework_params": {},
            "hps": values["hyperparameters"],
            "num_neurons": 0,
            "training_env": values,
            "user_args": command_arguments(program.hyperparameters),
            # What the drivers of SageMaker's SDK 3 set for torchrun.
            "host_count": len(host.hosts.names),
            "current_host_rank": host.hosts.number,
            "master_addr": host.hosts.names[0],
            "master_port": 7777,
            **{f"channel_{name}": str(self.channel(name)) for name in channels},
            **{f"hp_{name}": value for name, value in values["hyperparameters"].items()},
        }
        return {
            **{f"SM_{name.upper()}": _text(value) for name, value in named.items()},
            "CURRENT_HOST": host.hosts.own,
            "SAGEMAKER_JOB_NAME": job_name,
            "TRAINING_JOB_NAME": job_name,
        }

    def _environment(
        self, program: Program, host: ContainerHost, job_name: str, channels: Sequence[str]
    ) -> dict[str, Any]:
        """The toolkit's Environment, by its own names."""
        words, names = program.words, list(host.hosts.names)
        # The script, or the command itself.
        entry_point = next((word for word in words if word.endswith(".py")), words[0])
        return {
            "additional_framework_parameters": {},
            "channel_input_dirs": {name: str(self.channel(name)) for name in channels},
            "current_host": host.hosts.own,
            "current_instance_group": _GROUP,
            "current_instance_group_hosts": names,
            "current_instance_type": host.instance_type,
            "distribution_hosts": names,
            "distribution_instance_groups": [],
            "framework_module": None,
            "hosts": names,
            "hyperparameters": _decoded(program.hyperparameters),
            "input_config_dir": str(self.config),
            "input_data_config": _inputs(channels),
            "input_dir": str(self.root / "input"),
            "instance_groups": [_GROUP],
            "instance_groups_dict": {_GROUP: _group(host)},
            "is_hetero": False,
            "is_master": host.hosts.number == 0,
            "is_modelparallel_enabled": None,
            "job_name": job_name,
            "log_level": 20,
            "master_hostname": names[0],
            "model_dir": str(self.model),
            "module_dir": str(self.code),
            "module_name": entry_point.removesuffix(".py"),
            "network_interface_name": "eth0",
            "num_cpus": host.num_cpus,
            "num_gpus": host.num_gpus,
            "output_data_dir": str(self.output / "data"),
            "output_dir": str(self.output),
            "output_intermediate_dir": str(self.output / "intermediate"),
            "resource_config": _resources(host),
            "user_entry_point": entry_point,
        }


def _channel_folders(channels: Sequence[str], dataset: Path) -> dict[str, Path]:
    """Return each channel's folder; a lone channel without a folder gets the whole dataset."""
    if len(channels) == 1 and not (dataset / channels[0]).is_dir():
        return {channels[0]: dataset}
    for name in channels:
        if not (dataset / name).is_dir():
            there = sorted(path.name for path in dataset.iterdir() if path.is_dir())
            raise UserError(
                f"the dataset {dataset} has no folder for the channel {name!r}; "
                f"its folders are {', '.join(there) or '(none)'}"
            )
    return {name: dataset / name for name in channels}


def files_below(
    folder: Path, prefix: str, own: Sequence[Path], left_out: list[str], above: Sequence[str] = ()
) -> Iterator[tuple[str, Path]]:
    """Yield what is in a folder, with its name; links to folders are followed within the run's."""
    above = [*above, os.path.realpath(folder)]
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        # Neither keys nor reports can hold a name that is not text.
        name = f"{prefix}/{os.fsencode(path.name).decode(errors='backslashreplace')}"
        real = Path(os.path.realpath(path))
        is_ours = any(real.is_relative_to(os.path.realpath(one)) for one in own)
        if path.is_dir() and is_ours and str(real) not in above:
            yield from files_below(path, name, own, left_out, above)
        elif path.is_file():
            yield name, path
        else:
            left_out.append(f"{name} (a link to {real})" if path.is_symlink() else name)


def _decoded(hyperparameters: Mapping[str, str]) -> dict[str, Any]:
    """Decode values as the toolkit does: as JSON if the text is valid JSON, else as the text."""
    found: dict[str, Any] = {}
    for name, text in hyperparameters.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def command_arguments(hyperparameters: Mapping[str, str]) -> list[str]:
    """Hyperparameters as arguments, in the toolkit's order and form: --name value, sorted."""
    values = _decoded(hyperparameters)
    found = []
    for name in sorted(values):
        value = values[name]
        if isinstance(value, dict):
            value = ",".join(f"{key}={one}" for key, one in sorted(value.items()))
        found += [f"--{name}" if len(name) > 1 else f"-{name}", "" if value is None else str(value)]
    return found


def _encoded(hyperparameters: Mapping[str, str]) -> dict[str, str]:
    """Encode values as SageMaker's SDK stores them: each as JSON."""
    values = _decoded(hyperparameters)
    return {n: json.dumps(t) if values[n] == t else t for n, t in hyperparameters.items()}


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _group(host: ContainerHost) -> dict[str, Any]:
    return {
        "instance_group_name": _GROUP,
        "instance_type": host.instance_type,
        "hosts": list(host.hosts.names),
    }


def _resources(host: ContainerHost) -> dict[str, Any]:
    return {
        "current_host": host.hosts.own,
        "current_instance_type": host.instance_type,
        "current_group_name": _GROUP,
        "hosts": list(host.hosts.names),
        "instance_groups": [_group(host)],
        "network_interface_name": "eth0",
    }


def _inputs(channels: Sequence[str]) -> dict[str, Any]:
    described = {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    }
    return {name: dict(described) for name in channels}


def _num_gpus() -> int:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0  # no driver: no GPU that a program could use
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


@contextlib.contextmanager
def claimed(root: Path, run_uri: str) -> Iterator[None]:
    """Hold the root for one run; UserError if another one uses it, or has left files there."""
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((root / _LOCK).open("a"))
        except OSError as error:
            raise (MachineError if error.errno == errno.ENOSPC else UserError)(
                f"the folder {root} cannot be used ({error.strerror}); choose another --ml-root"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another program runs in {root}; wait for its end, or choose another --ml-root"
            ) from None
        _claim_files(root, run_uri)
        yield


def _claim_files(root: Path, run_uri: str) -> None:
    container, marker = Container(root=root), root / _RUN
    checkpoints, whose = container.checkpoints, marker.read_text() if marker.is_file() else ""
    if not whose:
        # What `Container.prepare` and `copy_source` replace.
        for folder in (container.code, root / "input", container.model, container.output):
            if folder.is_dir() and any(folder.iterdir()):
                raise UserError(
                    f"{folder} has files of something else, which this run would replace; "
                    "move them away, or choose another --ml-root"
                )
    if whose != run_uri and checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise UserError(
            f"{checkpoints} has files of {whose or 'something else'}, which this run would "
            "replace; move them away, or choose another --ml-root"
        )
    if whose != run_uri:  # else not written again: what this run left may have filled the disk
        write_whole(marker, run_uri.encode())


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
        # What the run begins with is its origin, with the snapshot.
        return {
            **{name: value for name, value in asdict(program).items() if name != "init_from"},
            "channels": list(program.channels),
            "keep": list(program.keep),
            "metric_definitions": [list(pair) for pair in program.metric_definitions],
            "source_sha256": source,
            "certificate": certified(self.source, program),
        }

    @property
    def container(self) -> Container:
        """The folders of the program."""
        return Container(root=self.root)

    @property
    def mirrored(self) -> Root:
        """What is saved and restored: the checkpoint folder, and what the program has to keep."""
        program, container = self.program, self.container
        if not program.keep:
            return container.checkpoints
        working = container.code / program.working_folder
        return Mirrored(folder=container.checkpoints, working=working, keep=program.keep)

    @property
    def notice_file(self) -> Path:
        """The file in which the program finds a notice."""
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
    own = {name: _expanded(value, contract) for name, value in program.environment.items()}
    path = os.pathsep.join([str(Path(interpreter).parent), environ.get("PATH", os.defpath)])
    variables = {
        **{name: value for name, value in environ.items() if not _is_own(name)},
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        **own,
        **contract,
        "TRAINING_NOTICE_FILE": str(options.notice_file),
        # Ours comes last: what the program brings is found first.
        "PYTHONPATH": os.pathsep.join(filter(None, [own.get("PYTHONPATH", ""), _BUNDLE_FOLDER])),
    }
    words = [_expanded(word, contract) for word in program.words]
    if words[0] in ("python", "python3"):
        words[0] = interpreter
    folder = container.code / program.working_folder
    resolve_command(words, folder, variables["PATH"])
    words += [_expanded(word, contract) for word in command_arguments(program.hyperparameters)]
    return _Command(words=tuple(words), folder=folder, variables=variables)


def _is_own(name: str) -> bool:
    is_decision = name in NAMES and name != "AWS_REGION"
    return is_decision or _OWN.fullmatch(name) is not None


def _expanded(word: str, contract: Mapping[str, str]) -> str:
    """Replace SM_ variables by their values; any other dollar sign stays."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in contract:
            raise UserError(
                f"the program uses ${name}, which is not part of the container contract; "
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
