"""A SageMaker training job as its container sees it: folders below /opt/ml and hyperparameters.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.trainer_options import SAGEMAKER_OPTIONS, recipe_field
from training.errors import UserError

_REQUIRED = ("workload", "recipe", "run-uri")
# What SageMaker and its SDK add of their own.
_FOREIGN = ("sagemaker_", "_tuning_")
# SageMaker sends SIGTERM and ends the container 120 s later.
_NOTICE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SageMakerJob:
    """One container's share of a training job."""

    root: Path
    arguments: tuple[str, ...]  # of `python -m training`
    run_uri: str
    notice_seconds: float
    model_folder: Path
    dataset: Path
    # Of `python -m training` before that: it makes the dataset of channels of files of your own.
    importing: tuple[str, ...] | None = None

    @property
    def failure_file(self) -> Path:
        """Its first kilobyte becomes the FailureReason of DescribeTrainingJob."""
        return self.root / "output" / "failure"


def read_job(root: Path, environ: Mapping[str, str]) -> SageMakerJob:
    """Read input/config; UserError if one machine cannot train that job."""
    given = dict(_hyperparameters(root))
    missing = [name for name in _REQUIRED if not given.get(name)]
    if missing:
        raise UserError(
            f"the job has no hyperparameter {', '.join(missing)}; submit it with "
            "`python -m stacks.sagemaker submit`, or set it in HyperParameters"
        )
    hosts = _config(root, "resourceconfig").get("hosts") or ["algo-1"]
    if len(hosts) > 1:
        raise UserError(
            f"the job has {len(hosts)} instances, but a run has one; set InstanceCount to 1"
        )
    options = {name: given.pop(name) for name in SAGEMAKER_OPTIONS if name in given}
    # The container's root has some 100 GB; /tmp, SageMaker's scratch space, has the job's volume.
    scratch = Path(tempfile.gettempdir(), "training")
    importing = None
    if "dataset-uri" not in options and _are_splits(root):
        options["dataset-uri"] = out = str(scratch / "dataset")
        source, workload = str(_channels_folder(root)), options["workload"]
        importing = ("data", "import", source, f"--workload={workload}", f"--out={out}")
    if "dataset-uri" not in options:
        options["dataset-uri"] = str(_channel_folder(root, environ))
    seconds = options.setdefault("notice-budget-seconds", f"{_NOTICE_SECONDS:g}")
    # A job that is started again on another instance has the same name.
    writer = f"{environ.get('TRAINING_JOB_NAME', 'sagemaker')}/{hosts[0]}-{_boot()}"
    arguments = [f"--{name}={value}" for name, value in options.items()]
    arguments += [f"--override={recipe_field(name)}={value}" for name, value in given.items()]
    return SageMakerJob(
        root=root,
        arguments=("run", *arguments, f"--writer={writer}", f"--scratch={scratch}"),
        run_uri=options["run-uri"],
        notice_seconds=_positive(seconds),
        model_folder=Path(environ.get("SM_MODEL_DIR", root / "model")),
        dataset=Path(options["dataset-uri"]),
        importing=importing,
    )


def _boot() -> str:
    """The start of this boot's id, another one on each machine; "" where the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return ""


def _hyperparameters(root: Path) -> Iterator[tuple[str, str]]:
    """The job's own; SageMaker's SDK encodes each value as JSON, the console does not."""
    for name, value in _config(root, "hyperparameters").items():
        if name.startswith(_FOREIGN):
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        if text.startswith('"'):
            with contextlib.suppress(ValueError):
                text = str(json.loads(text))
        yield name, text


def _are_splits(root: Path) -> bool:
    """Whether the channels are splits of files that are no dataset of this project's yet."""
    channels = _config(root, "inputdataconfig")
    if not {"train", "validation"} <= channels.keys() <= {"train", "validation", "test"}:
        return False
    for name, channel in channels.items():
        _refuse_pipe(name, channel)
    return True


def _channels_folder(root: Path) -> Path:
    return root / "input" / "data"


def _channel_folder(root: Path, environ: Mapping[str, str]) -> Path:
    channels = _config(root, "inputdataconfig")
    name = next(iter(channels)) if len(channels) == 1 else "training"
    if name not in channels:
        raise UserError(
            f"the job's channels are {', '.join(channels) or 'none'}: name the one with the "
            "dataset 'training', or those with files of your own 'train' and 'validation', or set "
            "the hyperparameter dataset-uri to its S3 URI"
        )
    _refuse_pipe(name, channels[name])
    return Path(environ.get(f"SM_CHANNEL_{name.upper()}", _channels_folder(root) / name))


def _refuse_pipe(name: str, channel: Mapping[str, Any]) -> None:
    if channel.get("TrainingInputMode", "File") == "Pipe":
        raise UserError(
            f"the channel {name!r} is in Pipe mode, which has no files; set its InputMode to File"
        )


def _config(root: Path, name: str) -> dict[str, Any]:
    """One file of input/config; nothing if it is missing, as inputdataconfig.json may be."""
    path = root / "input" / "config" / f"{name}.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); SageMaker writes it: see the job") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object; SageMaker writes it: see the job")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 3600:
        raise UserError(
            f"the hyperparameter notice-budget-seconds is {text!r}; write seconds, as in 120"
        )
    return value
