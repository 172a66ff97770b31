"""The stacks on the embedded AWS, deployed by the real CDK CLI.

It does everything before a rehearsal's first machine boots: bootstrap, synth, deploy, upload.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from contract.cleared_folder import cleared_folder
from contract.stack_names import stack_name, training_stack
from embedded_aws import EmbeddedAws, EventBus
from rehearsal.demo.children import Child, Children, run_cdk, start_cdk
from rehearsal.demo.fleet import BootableMachine, Fleet, RehearsalFailed
from rehearsal.demo.run_files import BucketFiles, bucket_files
from rehearsal.machines.metadata import Credentials, MetadataServer, RehearsedInstance
from rehearsal.machines.nspawn.control_groups import all_processes
from rehearsal.machines.nspawn.machine import NspawnMachine
from rehearsal.machines.nspawn.namespaces import check_host, enter_namespaces
from rehearsal.machines.nspawn.network import MachineNetwork
from rehearsal.machines.nspawn.root_image import root_image
from rehearsal.machines.process import ProcessMachine
from rehearsal.machines.quirks import Quirks
from sizing import catalogue

REPOSITORY = Path(__file__).parents[2]
DATASET, NETWORK, SWEEPS = "DatasetStack", "NetworkStack", "SweepStack"
# Of the app that the CLI synthesizes in this folder.
PREFIX: str = json.loads((REPOSITORY / "cdk.json").read_text("utf-8"))["context"]["prefix"]
# EC2 gives 120 s and the interruption handler polls every 2 s; a shorter notice keeps the ratio.
NOTICE_SECONDS, HANDLER_POLL_SECONDS = 120.0, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployedStacks:
    """One embedded AWS that has our stacks or is about to; `folder` holds the files.

    Stacks are given by construct id. `training` is the run's; all runs share the others.
    """

    folder: Path
    aws: EmbeddedAws
    children: Children
    nspawn: Callable[..., NspawnMachine] | None = None  # makes a machine; None: process machines
    training: str = training_stack()

    @property
    def dataset(self) -> Path:
        """The folder of the dataset to upload."""
        return self.folder / "dataset"

    def bootstrap(self) -> None:
        """Prepare the account for the CDK CLI."""
        environment = f"aws://{self.aws.account}/{self.aws.region}"
        # The environment is explicit, so the app, which the CLI would synthesize, is left out.
        run_cdk(self.children, "cdk bootstrap", "bootstrap", environment, "--app", "")

    def upload(self, name: str) -> Child:
        """Start uploading the dataset to the deployed bucket, under this name; do not wait."""
        bucket = self.output(DATASET, "DatasetBucketName")
        return self.start_python(
            "upload",
            *("-m", "training", "data", "upload", str(self.dataset)),
            *("--dataset-uri", f"s3://{bucket}/{name}"),
        )

    def synthesize(self, assembly: Path, context: Mapping[str, str]) -> Child:
        """Start synthesizing the app with this context; do not wait."""
        options = [word for name, value in context.items() for word in ("-c", f"{name}={value}")]
        words = ["synth", "--quiet", "--output", str(assembly), *options]
        return start_cdk(self.children, "cdk synth", *words)

    def deploy(
        self, assembly: Path, stack: str, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Deploy one stack of a synthesized assembly, after the stacks that it needs."""
        words = ["deploy", "--app", str(assembly), "--require-approval", "never"]
        arguments = [*words, "--progress", "events", stack]
        run_cdk(self.children, f"cdk deploy {stack}", *arguments, meanwhile=meanwhile)

    def check_resources(self) -> dict[str, int]:
        """Count the deployed resources by type; raise if one does not exist in its service."""
        ids = [DATASET, *([NETWORK] if self.training != SWEEPS else []), self.training]
        stacks = [stack_name(PREFIX, each) for each in ids]
        missing = self.aws.engine.missing_resources(stacks)
        if missing:
            raise RehearsalFailed(f"deployed, but missing: {', '.join(missing)}")
        counts = Counter[str]()
        for stack in stacks:
            found = self.aws.client("cloudformation").describe_stack_resources(StackName=stack)
            counts.update(resource["ResourceType"] for resource in found["StackResources"])
        self.children.say(f"{counts.total()} resources exist, each checked by its own API")
        return counts

    def fleet(
        self,
        bus: EventBus,
        boot: Callable[[RehearsedInstance], BootableMachine],
        say: Callable[[str], None],
    ) -> Fleet:
        """Return the currently deployed fleet."""
        stack = stack_name(PREFIX, self.training)
        found = self.aws.client("ssm").get_parameter(Name=f"/{stack}/fleet-id")
        identifier = str(found["Parameter"]["Value"])
        return Fleet(aws=self.aws, bus=bus, id=identifier, boot=boot, say=say, stack=stack)

    def run_files(self) -> BucketFiles:
        """Return the files of the currently deployed run."""
        return bucket_files(self.aws.client("s3"), self.output(self.training, "RunUri"))

    def machine(
        self, instance: RehearsedInstance, folder: Path, notice_seconds: float, quirks: Quirks
    ) -> BootableMachine:
        """Return the machine of an instance, not yet started."""
        session = self.aws.begin_session(instance.id)
        metadata = MetadataServer(
            instance=instance,
            account=self.aws.account,
            role=session.role_arn.rpartition("/")[2],
            credentials=Credentials(
                access_key_id=session.access_key_id,
                secret_access_key=session.secret_access_key,
                token=session.session_token,
            ),
            faults=self.aws.faults,
        )
        if self.nspawn is not None:
            return self.nspawn(folder=folder / instance.id, metadata=metadata, quirks=quirks)
        return ProcessMachine(
            folder=folder / instance.id,
            environment={
                **self.aws.environment(),
                **handler_poll(notice_seconds),
                "TRAINING_CPU_RANKS": str(catalogue.find(instance.type).num_gpus),
            },
            metadata=metadata,
            quirks=quirks,
        )

    def processes_left(self, folder: Path) -> int:
        """Return how many processes of machines below the folder still run."""
        others = 0 if self.nspawn is None else len(all_processes())
        return len(processes_below(folder)) + others

    def output(self, stack: str, name: str) -> str:
        """Return one output of a deployed stack."""
        client = self.aws.client("cloudformation")
        (found,) = client.describe_stacks(StackName=stack_name(PREFIX, stack))["Stacks"]
        outputs = {item["OutputKey"]: item["OutputValue"] for item in found["Outputs"]}
        return str(outputs[name])

    def start_python(self, name: str, *arguments: str, **variables: str) -> Child:
        """Start a Python program of this repository; do not wait."""
        command = [sys.executable, *arguments]
        own = {"PYTHONUNBUFFERED": "1", **variables}
        return self.children.start(name, command, **own)


def handler_poll(notice_seconds: float) -> dict[str, str]:
    """Return the variable that scales the interruption handler's polling to a shorter notice."""
    poll = min(1.0, notice_seconds / NOTICE_SECONDS) * HANDLER_POLL_SECONDS
    return {"POLL_SECONDS": f"{poll:g}"}


def processes_below(folder: Path) -> list[psutil.Process]:
    """List the running processes of process machines and containers below the folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            root = variables.get("MACHINE_ROOT") or variables.get("TMPDIR")
            if root is not None and Path(root).is_relative_to(folder):
                found.append(process)
    return found


@contextmanager
def embedded_stacks(
    out: Path,
    *,
    is_nspawn: bool,
    say: Callable[[str], None],
    output: Callable[[str], None] | None = None,
) -> Iterator[DeployedStacks]:
    """Start an embedded AWS for the stacks, with its files in `out`.

    The output of programs goes to `output`, by default to cdk.log.
    """
    folder = (REPOSITORY / out).resolve()

    def keep(text: str) -> None:
        with (folder / "cdk.log").open("a", encoding="utf-8") as log:
            print(text, file=log)

    image = None
    if is_nspawn:
        check_host()
        image = root_image(say)
        enter_namespaces()
    with ExitStack() as stack:
        stack.enter_context(cleared_folder(folder))
        # moto keeps S3's large objects in files without names there.
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(folder)
        aws = stack.enter_context(EmbeddedAws(spot_usd=spot_usd))
        environment = child_environment(aws)
        children = stack.enter_context(
            Children(say=output or keep, environment=environment, folder=REPOSITORY)
        )
        nspawn = None
        if image is not None:
            network = stack.enter_context(MachineNetwork(folder=folder / "network"))
            network.serve_aws(aws.application, aws.region)
            nspawn = partial(NspawnMachine, image=image, network=network)
        yield DeployedStacks(folder=folder, aws=aws, children=children, nspawn=nspawn)


def spot_usd(size: str) -> float:
    """Return a size's Spot price by the catalogue, in dollars per hour."""
    return catalogue.spot_price(size).usd_per_hour


def child_environment(aws: EmbeddedAws) -> dict[str, str]:
    """Return our environment, with the embedded AWS and the virtual environment's node and cdk."""
    # Runs and machines share the cores: a spinning thread would slow down those it waits for.
    # Options of `cdk` and ranks of a torchrun around this are not the rehearsal's.
    others = ("AWS_", "CDK_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])
    return {"OMP_WAIT_POLICY": "PASSIVE", **kept, **aws.environment(), "PATH": path}
