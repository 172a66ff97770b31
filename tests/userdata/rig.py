"""Shared by the boot tests: a bundle with the real userdata/ and a small trainer, and a fleet.

The trainer keeps to the command line of training/ and does what the machine's variable ORDERS says:
that way one bundle serves every test.
"""

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moto.ec2.models import ec2_backends

from embedded_aws import EmbeddedAws
from rehearsal.demo.trained import RehearsedProgram
from rehearsal.machines.metadata import Credentials, MetadataServer, RehearsedInstance
from rehearsal.machines.process import EC2_DISKS, SHIMS, JsonDisk, ProcessMachine
from stacks.bundle import EXCLUDED_FOLDERS, FOLDERS
from stacks.parameters import StackParameters
from stacks.program_source import write_source
from stacks.user_data import render
from tests.machine_key import machine_key
from training.durable.store.local_dataset import LocalDataset
from userdata.run_env import read_run_env

REPOSITORY = Path(__file__).parents[2]
USERDATA = REPOSITORY / "userdata"
PATIENCE_SECONDS = 300.0

TRAINER = '''
"""Keeps to the command line of training/; what it does is ordered from outside."""
import argparse, json, os, signal, sys, time
from pathlib import Path
from urllib.parse import urlsplit

parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("--run-uri")
parser.add_argument("--reason")
parser.add_argument("--metrics-file")
parser.add_argument("--begun-file", type=Path)
options, _ = parser.parse_known_args()
root = Path(os.environ["MACHINE_ROOT"])

def note(line):
    with (root / "trainer.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")

def put_head(state, reason=None):
    import boto3
    place = urlsplit(options.run_uri)
    bucket, prefix = place.netloc, place.path.strip("/")
    head = json.dumps({"state": state, "reason": reason}).encode()
    boto3.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/head.json", Body=head)

orders = json.loads(os.environ["ORDERS"])
if options.command == "run":
    received = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
note({"argv": sys.argv[1:], "pid": os.getpid(), "environment": dict(os.environ)})
if options.command == "fail":
    put_head("failed", options.reason)
elif options.command == "data":
    while orders.get("sync") == "until notice" and not (root / "run/training/notice.json").exists():
        time.sleep(0.05)
    if orders.get("sync") == "until it is asked":
        options.begun_file.touch()
        while not (root / "sync-ends").exists():
            time.sleep(0.05)
        if status := int((root / "sync-ends").read_text()):
            print("[dataset] 3 files\\nerror: clip-7 is missing; upload it again", file=sys.stderr)
        sys.exit(status)
    sys.exit(orders["sync"] if isinstance(orders.get("sync"), int) else 0)
elif orders["run"] == "finish":
    put_head("finished")
elif orders["run"] == "wait":
    print("trainer listens", flush=True)
    while not {"SIGUSR1", "SIGTERM"} & set(received):
        signal.pause()
        note({"signals": received})
    put_head("released")
    sys.exit(75)
else:
    with open(options.metrics_file, "a") as file:
        file.writelines(line + "\\n" for line in orders.get("lines", ()))
    print(orders.get("words", "the trainer's last words"), flush=True)
    sys.exit(orders["run"])
'''

# The end of lib.sh: a step that the machine's variable FAULTS names fails, `once` or `always`.
FAULTS = """
script=${0##*/}
if [[ " ${FAULTS:-} " == *" $script:once "* && ! -e $root/tmp/$script.failed ]]; then
    : >"$root/tmp/$script.failed"
    fail "$script is made to fail once"
elif [[ " ${FAULTS:-} " == *" $script:always "* ]]; then
    fail "$script is made to fail"
fi
"""


def make_bundle(path: Path, *, real_torch: bool) -> bytes:
    """Zip the real contract/ and userdata/ with the small trainer; restarts come faster."""
    with zipfile.ZipFile(path, "w") as bundle:
        for file in sorted([*USERDATA.rglob("*"), *(REPOSITORY / "contract").rglob("*")]):
            if file.is_file() and "__pycache__" not in file.parts:
                text = file.read_text().replace("RestartSec=3\n", "RestartSec=0.1\n")
                text += FAULTS if file.name == "lib.sh" else ""
                bundle.writestr(file.relative_to(REPOSITORY).as_posix(), text)
        bundle.writestr("training/__main__.py", TRAINER)
        if not real_torch:
            # The import takes two seconds, and one boot with the real one is enough.
            bundle.writestr(
                "userdata/torch.py", '__version__ = "0"\n\n\nclass cuda:\n    device_count = int\n'
            )
    return path.read_bytes()


@dataclass(kw_only=True, slots=True)
class Rig:
    """One run of its own on a shared embedded AWS, and the machines that boot into it."""

    aws: EmbeddedAws
    folder: Path
    run_id: str
    fleet_id: str
    parameter: str
    bundle: str = "bundle.zip"
    orders: Mapping[str, object] = field(default_factory=lambda: {"run": "wait"})
    machines: list[ProcessMachine] = field(default_factory=list)

    def order(self, **orders: object) -> None:
        """Tell the trainer what to do."""
        self.orders = orders

    def put(self, name: str, content: object) -> None:
        """Write an object of the run."""
        body = json.dumps(content).encode()
        key = f"runs/{self.run_id}/{name}"
        self.aws.client("s3").put_object(Bucket="runs", Key=key, Body=body)

    def read(self, name: str) -> Any:
        """Read an object of the run."""
        key = f"runs/{self.run_id}/{name}"
        return json.loads(self.aws.client("s3").get_object(Bucket="runs", Key=key)["Body"].read())

    def events(self) -> list[dict[str, Any]]:
        """The events that have arrived in S3, in order."""
        prefix = f"runs/{self.run_id}/events/"
        found = self.aws.client("s3").list_objects_v2(Bucket="runs", Prefix=prefix)
        keys = [
            item["Key"].removeprefix(f"runs/{self.run_id}/") for item in found.get("Contents", [])
        ]
        return [self.read(key) for key in keys]

    def target_capacity(self) -> int:
        """The capacity that the fleet is asked to keep."""
        ec2 = self.aws.client("ec2")
        found = ec2.describe_spot_fleet_requests(SpotFleetRequestIds=[self.fleet_id])
        config = found["SpotFleetRequestConfigs"][0]["SpotFleetRequestConfig"]
        return int(config["TargetCapacity"])

    def run_env(self, **changes: str | None) -> dict[str, str]:
        """A whole run.env, the example's but for this; None takes a variable out."""
        variables: dict[str, str | None] = {
            **read_run_env(USERDATA / "run.env.example"),
            "RUN_ID": self.run_id,
            "RECIPE": "laptop",
            "OVERRIDES": '"epochs=2 width=64"',
            "PREDICTION": '"size=g5.xlarge hours_p50=0.2"',
            "DATASET_URI": "s3://datasets/trajectory",
            "RUN_URI": f"s3://runs/runs/{self.run_id}",
            "BUNDLE_URI": f"s3://assets/{self.bundle}",
            "TRAINER_OPTIONS": '"checkpoint_interval=2epochs keep=3"',
            "STACK_NAME": "TrainingStack",
            "FLEET_PARAMETER": self.parameter,
            **changes,
        }
        return {name: value for name, value in variables.items() if value is not None}

    def machine(
        self,
        *,
        variables: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> ProcessMachine:
        """Power a new machine on, with the user data that the stack would render."""
        instance_id = self.instance()
        written = dict(variables or self.run_env())
        self.aws.client("ssm").put_parameter(
            Name=f"{self.parameter.rpartition('/')[0]}/bundle-uri",
            Value=written.pop("BUNDLE_URI"),
            Type="String",
            Overwrite=True,
        )
        user_data = render(written)
        machine = ProcessMachine(
            folder=self.folder / f"machine-{len(self.machines)}",
            environment={
                **self.aws.environment(),
                "POLL_SECONDS": "0.1",
                "STEP_RETRY_SECONDS": "0.01",
                "TERMINATE_RETRY_SECONDS": "0.2",
                "ORDERS": json.dumps(self.orders),
                **(environment or {}),
            },
            metadata=MetadataServer(
                instance=RehearsedInstance(id=instance_id, user_data=user_data.encode()),
                credentials=Credentials(access_key_id=machine_key(self.aws)),
            ),
            **{"disks": EC2_DISKS, **settings},
        )
        self.machines.append(machine)
        machine.start()
        return machine

    def protect(self, machine: ProcessMachine, is_protected: bool) -> None:
        """Let EC2 refuse to terminate the machine's instance; moto's API does not take it over."""
        backend = ec2_backends["123456789012"]["us-east-1"]
        backend.get_instance(machine.instance_id).disable_api_termination = is_protected

    def instance(self) -> str:
        """Have EC2 run one more instance, for the next machine."""
        ran = self.aws.client("ec2").run_instances(
            ImageId="ami-0123456789abcdef0", MinCount=1, MaxCount=1
        )
        return str(ran["Instances"][0]["InstanceId"])

    def instance_state(self, machine: ProcessMachine) -> str:
        """The state of the machine's instance in EC2."""
        return self.state_of(machine.instance_id)

    def state_of(self, instance_id: str) -> str:
        """The state of an instance in EC2."""
        found = self.aws.client("ec2").describe_instances(InstanceIds=[instance_id])
        return str(found["Reservations"][0]["Instances"][0]["State"]["Name"])

    def close(self) -> None:
        """End all machines; nothing of them may be left."""
        for machine in self.machines:
            machine.kill()
            assert machine.processes() == []


def install(path: Path, text: str) -> Path:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    """Write a wheel with one module that knows its version."""
    about, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def lay_disks(root: Path, *disks: JsonDisk) -> None:
    """Attach disks to a machine that is only a folder."""
    (root / "sys/disks").mkdir(parents=True, exist_ok=True)
    for disk in disks:
        (root / f"sys/disks/{disk.name}.json").write_text(json.dumps(asdict(disk)))


def find_disk(
    root: Path, program: str, place: str, *disks: JsonDisk
) -> subprocess.CompletedProcess[str]:
    """Run a boot program that looks for a disk."""
    lay_disks(root, *disks)
    path = f"{SHIMS}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        [sys.executable, "-m", f"userdata.{program}", place],
        cwd=REPOSITORY,
        env={"MACHINE_ROOT": str(root), "DISK_WAIT_SECONDS": "0", "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def wait(machine: ProcessMachine, text: str) -> None:
    """Wait for a line in the machine's log, else fail with the whole log."""
    if not machine.wait(PATIENCE_SECONDS, text):
        lines = "\n".join(machine.log_lines())
        raise AssertionError(f"no line with {text!r} in:\n{lines}")


def run_on(machine: ProcessMachine, *command: str) -> None:
    """Run a command as on the machine."""
    environment = json.loads((machine.folder / "run/machine.json").read_text())
    subprocess.run(command, env=environment, check=True)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until something holds."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come about"
        time.sleep(0.02)


def trainer_notes(machine: ProcessMachine) -> list[dict[str, Any]]:
    """The calls and signals that the small trainer has written down."""
    path = machine.folder / "trainer.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def calls(machine: ProcessMachine, command: str) -> list[list[str]]:
    """The command lines of one of the trainer's commands."""
    noted = [note["argv"] for note in trainer_notes(machine) if "argv" in note]
    return [argv for argv in noted if argv[0] == command]


def signals(machine: ProcessMachine) -> list[str]:
    """The signals that the small trainer has received."""
    noted = [note["signals"] for note in trainer_notes(machine) if "signals" in note]
    return noted[-1] if noted else []


EXAMPLES = REPOSITORY / "examples"
# The import takes seconds, and is no part of what a program does.
NO_TORCH = '__version__ = "0"\n\n\nclass cuda:\n    device_count = int\n'


def files_of_the_bundle() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            name = path.relative_to(REPOSITORY).as_posix()
            is_code = path.is_file() and "__pycache__" not in path.parts
            if is_code and not name.startswith(EXCLUDED_FOLDERS):
                yield path


def boot_program(
    rig: Rig, example: str, tmp_path: Path, **hyperparameters: object
) -> dict[str, str]:
    """Upload the example's bundle and data; return the run.env of its machines."""
    data = tmp_path / "data"
    maker = [sys.executable, str(EXAMPLES / "make_data.py"), str(data), "--count", "2048"]
    subprocess.run(maker, check=True)
    LocalDataset.complete(data, "program", {})
    s3 = rig.aws.client("s3")
    for path in data.iterdir():
        s3.upload_file(str(path), "datasets", f"{rig.run_id}/{path.name}")
    spec = RehearsedProgram.from_folder(EXAMPLES / example, data)
    own = tmp_path / "program.json"
    record = json.loads((EXAMPLES / example / "program.json").read_text())
    given = {**record.get("hyperparameters", {}), **hyperparameters}
    # Its epochs are shorter here.
    own.write_text(json.dumps({**record, "hyperparameters": given, "quiet_seconds": 0.2}))
    context = {**spec.context(), "program": str(own), "source": str(EXAMPLES / example)}
    write_source(StackParameters.for_size("g5.xlarge", **context), tmp_path)
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as bundle:
        for file in files_of_the_bundle():
            bundle.write(file, file.relative_to(REPOSITORY).as_posix())
        for file in sorted((tmp_path / "program").rglob("*")):
            bundle.write(file, file.relative_to(tmp_path).as_posix())
        bundle.writestr("userdata/torch.py", NO_TORCH)
    rig.bundle = f"{rig.run_id}.zip"
    s3.upload_file(str(path), "assets", rig.bundle)
    return rig.run_env(
        WORKLOAD="program",
        RECIPE="program",
        OVERRIDES='""',
        DATASET_URI=f"s3://datasets/{rig.run_id}",
        TRAINER_OPTIONS='"lease_ttl_seconds=2"',
        NOTICE_BUDGET_SECONDS="60",
    )
