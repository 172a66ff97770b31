"""`python -m training sagemaker`: train a workload as the container of a SageMaker training job.

Checkpoints go to the run's own S3 prefix: SageMaker's copy of /opt/ml/checkpoints writes without
conditions, in no order, and cannot hold a lease. Imports no torch. What a container sees:
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from contract.errors import Exit, UserError
from contract.grammar import parse_positive
from contract.keys import CONFIG, FINAL, MANIFEST, RECEIPT, REPORT, SPLITS
from contract.trainer_options import SAGEMAKER_OPTIONS, recipe_field
from training.cli.run import checked_folder
from training.durable import Head, StoreError, open_store

_CHANNELS = Path("input/data")
_REQUIRED = ("workload", "recipe", "run-uri")
# Prefixes of what SageMaker and its SDK add.
_FOREIGN = ("sagemaker_", "_tuning_")
# SageMaker sends SIGTERM and ends the container 120 s later.
_NOTICE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _SageMakerJob:
    """One container's share of a training job."""

    root: Path
    arguments: tuple[str, ...]  # of `python -m training`
    run_uri: str
    notice_seconds: float
    model_folder: Path
    dataset: Path
    leads: bool  # whether it is the first host, which leaves the model
    variables: Mapping[str, str]  # for the trainer, unless the job sets them
    # Of `python -m training` before that, to make the dataset from channels of the user's files.
    importing: tuple[str, ...] | None = None


def _read_job(root: Path, environ: Mapping[str, str]) -> _SageMakerJob:
    """Read input/config; UserError if this project cannot train that job."""
    given = dict(_hyperparameters(root))
    missing = [name for name in _REQUIRED if not given.get(name)]
    if missing:
        raise UserError(
            f"the job has no hyperparameter {', '.join(missing)}; submit it with "
            "`python -m stacks.sagemaker submit`, or set it in HyperParameters"
        )
    resources = _config(root, "resourceconfig")
    hosts = resources.get("hosts") or ["algo-1"]
    own = resources.get("current_host") or hosts[0]
    options = {name: given.pop(name) for name in SAGEMAKER_OPTIONS if name in given}
    # The container's root has some 100 GB; /tmp, SageMaker's scratch space, has the job's volume.
    scratch = Path(tempfile.gettempdir(), "training")
    importing = None
    if "dataset-uri" not in options and _are_splits(root):
        options["dataset-uri"] = out = str(scratch / "dataset")
        source, workload = str(root / _CHANNELS), options["workload"]
        importing = ("data", "import", source, f"--workload={workload}", f"--out={out}")
    if "dataset-uri" not in options:
        options["dataset-uri"] = str(_channel_folder(root, environ))
    seconds = options.setdefault("notice-budget-seconds", f"{_NOTICE_SECONDS:g}")
    # A job that is started again on another instance has the same name.
    writer = f"{environ.get('TRAINING_JOB_NAME', 'sagemaker')}/{own}-{_boot()}"
    arguments = [f"--{name}={value}" for name, value in options.items()]
    for name, value in given.items():
        arguments.append(f"--override={recipe_field(name, options['workload'])}={value}")
    arguments += [f"--writer={writer}", f"--scratch={scratch}"]
    if len(hosts) > 1:
        arguments.append(f"--hosts={own}@{','.join(hosts)}")
    return _SageMakerJob(
        root=root,
        arguments=("run", *arguments),
        run_uri=options["run-uri"],
        notice_seconds=parse_positive(seconds),
        model_folder=Path(environ.get("SM_MODEL_DIR", root / "model")),
        dataset=Path(options["dataset-uri"]),
        leads=own == hosts[0],
        variables=_over_the_network(resources) if len(hosts) > 1 else {},
        importing=importing,
    )


def _over_the_network(resources: Mapping[str, Any]) -> dict[str, str]:
    """Return variables with the interface that SageMaker names: gloo and NCCL would guess it."""
    name = resources.get("network_interface_name")
    there = [found for _, found in socket.if_nameindex()]
    if name and name not in there:
        raise UserError(
            f"the job's hosts are to meet over the interface {name!r}, but this one has "
            f"{', '.join(there)}; SageMaker writes resourceconfig.json: see the job"
        )
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}


def _boot() -> str:
    """Return the start of this boot's id, which differs on each machine; "" if there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return ""


def _hyperparameters(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the job's own; SageMaker's SDK encodes each value as JSON, the console does not."""
    for name, value in _config(root, "hyperparameters").items():
        if name.startswith(_FOREIGN):
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        if text.startswith('"'):
            with contextlib.suppress(ValueError):
                text = str(json.loads(text))
        yield name, text


def _are_splits(root: Path) -> bool:
    """Whether the channels are splits of files, not yet a dataset of this project."""
    channels = _config(root, "inputdataconfig")
    if not {"train", "validation"} <= channels.keys() <= {*SPLITS}:
        return False
    for name, channel in channels.items():
        _refuse_pipe(name, channel)
    return True


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
    return Path(environ.get(f"SM_CHANNEL_{name.upper()}", root / _CHANNELS / name))


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


# As in training.service: three failures in six hours are not a coincidence.
_MAX_FAILURES, _WITHIN_SECONDS = 3, 6 * 3600.0
_RESTART_SECONDS = 3.0
# Bounded, as a process that outlives the command holds its standard error open.
_LAST_WORDS_SECONDS = 5.0
# How late SageMaker's SIGKILL may be.
_LATE_SECONDS = 30.0
# Prefixes of its lines that say why it ends.
_REASONS = ("error: ", "[failed] ")
_TRAINING = (sys.executable, "-m", "training")
_EXIT_TERMINATED = 128 + signal.SIGTERM
# FailureReason has 1,024 characters.
_MAX_REASON = 1024


def add_sagemaker(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sagemaker`."""
    parser.description = (
        "Run as the entry point of a SageMaker training job: read workload, recipe, run URI and "
        "overrides from the job's hyperparameters, train or resume, and leave the weights in "
        "/opt/ml/model. SIGTERM is a notice of 120 s: the run is saved, and the container waits "
        "for its end, so that the job counts neither as completed nor as failed."
    )
    add = parser.add_argument
    add("verb", nargs="?", choices=["train"], help="what SageMaker adds to the image's entry point")
    add("--ml-root", type=Path, default=Path("/opt/ml"), help="default: %(default)s")
    parser.set_defaults(act=_act)


def _act(arguments: argparse.Namespace) -> int:
    root: Path = arguments.ml_root
    try:
        job = _read_job(root, os.environ)
        checked_folder(job.model_folder)
        return _train(job)
    except (UserError, StoreError) as error:
        # SageMaker shows a reason nowhere else.
        _write_failure(root, str(error))
        raise


def _train(job: _SageMakerJob) -> int:
    command, code = _import(job)
    if code == Exit.FINISHED:
        command = _Command(
            [*_TRAINING, *job.arguments], environment={**job.variables, **os.environ}
        )
        code = command.run()
    if code == Exit.FINISHED:
        # SageMaker makes one archive of all hosts' model folders.
        return _leave_model(job) if job.leads else Exit.FINISHED
    if command.terminated_at is not None:
        how = f"not saved: {command.reason(code)}"
        if code == Exit.INTERRUPTED:  # what this host has done may lie beyond the last commit
            head = _head(job)
            newest = head.checkpoints[-1:] if head else ()
            how = f"its last commit is of step {newest[0].step}" if newest else "it has ended"
        return _await_the_end(job, command.terminated_at, how)
    _write_failure(job.root, _reason_of_run(job) or command.reason(code))
    return code if code > 0 else Exit.FAILED


def _import(job: _SageMakerJob) -> tuple["_Command", int]:
    """Make the dataset from the user's own files, which are checked before anything is trained."""
    if job.importing is None or (job.dataset / MANIFEST).is_file():
        return _Command(_TRAINING), Exit.FINISHED
    # A container that was killed may have left part of it.
    shutil.rmtree(job.dataset, ignore_errors=True)
    command = _Command([*_TRAINING, *job.importing], max_failures=1)
    return command, command.run()


def _reason_of_run(job: _SageMakerJob) -> str | None:
    """Return why the run has failed for good: a second attempt says so only in its log."""
    head = _head(job)
    return head.reason if head is not None and head.state == "failed" else None


def _head(job: _SageMakerJob) -> Head | None:
    with contextlib.suppress(UserError, StoreError):
        return Head.read(open_store(job.run_uri))
    return None


class _Command:
    """A process of `python -m training`: started again after a crash, and ended when we are."""

    def __init__(
        self,
        command: Sequence[str],
        sleep: Callable[[float], None] = time.sleep,
        max_failures: int = _MAX_FAILURES,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.terminated_at: float | None = None  # when SIGTERM came, on the monotonic clock
        self._command = command
        self._sleep = sleep
        self._max_failures = max_failures
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._last_line = self._reason = ""  # its last line, and its last that gives a reason

    def run(self) -> int:
        """Train to an end; return the last attempt's exit code, or 75 if SIGTERM came before it."""
        before = signal.signal(signal.SIGTERM, self._pass_on)
        try:
            code: int = Exit.INTERRUPTED
            failed_at: deque[float] = deque(maxlen=self._max_failures)
            while self.terminated_at is None:
                code = self._attempt()
                if code == Exit.INTERRUPTED and self.terminated_at is None:
                    print("[sagemaker] another host is ending; waiting for all of them", flush=True)
                    self._sleep(_RESTART_SECONDS)
                    continue
                failed_at.append(time.monotonic())
                is_crash = code in (Exit.FAILED, Exit.STORE) or code < 0
                are_many = len(failed_at) == self._max_failures
                if not is_crash or (are_many and failed_at[-1] - failed_at[0] < _WITHIN_SECONDS):
                    break
                if self.terminated_at is None:
                    print(f"[sagemaker] {self.reason(code)}; trying again", flush=True)
                    self._sleep(_RESTART_SECONDS)
            return code
        finally:
            signal.signal(signal.SIGTERM, before)

    def reason(self, code: int) -> str:
        """Return why it failed: its own reason, which stacks may follow, else its last line."""
        words = self._reason or self._last_line
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{words} ({how})" if words else f"the command ended with {how}"

    def _attempt(self) -> int:
        self._last_line = self._reason = ""
        process = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._process = process
        if self.terminated_at is not None:
            process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        listener = threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)
        listener.start()
        code = process.wait()
        listener.join(_LAST_WORDS_SECONDS)
        return code

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr:
            while line := stderr.readline(65536):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
                if text := line.decode(errors="replace").strip():
                    self._last_line = text
                    if text.startswith(_REASONS):
                        self._reason = text.partition(" ")[2]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.terminated_at is None:
            self.terminated_at = time.monotonic()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)


def _leave_model(job: _SageMakerJob) -> int:
    """Copy the deliverables to the model folder, which SageMaker uploads as model.tar.gz."""
    store = open_store(job.run_uri)
    for key in (FINAL, CONFIG, RECEIPT, REPORT):
        try:
            store.get_file(key, job.model_folder / Path(key).name)
        except FileNotFoundError:
            if key == FINAL:
                raise UserError(
                    f"{store.uri} is finished, but its {FINAL} is gone; train again under another "
                    "run URI"
                ) from None
            # A machine lost right after the run finished leaves it without a report.
            print(f"[sagemaker] {store.uri} has no {key}", flush=True)
    print(f"[ok] {job.model_folder} has {Path(FINAL).name}", flush=True)
    return Exit.FINISHED


def _await_the_end(job: _SageMakerJob, terminated_at: float, how: str) -> int:
    """Wait for SageMaker to kill the container; say so where it does not.

    It reads exit code 0 as a completed job and any other as a failed one, and this is neither.
    """
    print(f"[sagemaker] {how}; this container waits for its end", flush=True)
    while (left := terminated_at + job.notice_seconds + _LATE_SECONDS - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
    _write_failure(
        job.root,
        f"interrupted, {how}: submit the same job again, and {job.run_uri} resumes from its last "
        "commit",
    )
    return _EXIT_TERMINATED


def _write_failure(root: Path, reason: str) -> None:
    """Write the FailureReason of DescribeTrainingJob."""
    path = root / "output" / "failure"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(reason[:_MAX_REASON], encoding="utf-8")
    except OSError as error:
        print(f"[sagemaker] {path} could not be written: {error}", file=sys.stderr)
