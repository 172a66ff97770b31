"""A machine that is a folder and a process tree: boots user data verbatim, needs no root.

What it replaces of a real instance stands in docs/rehearsal.md. It cannot outlive the process that
started it, and it inherits nothing of that process's environment, AWS settings least of all.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from rehearsal.machines.metadata import MetadataServer
from rehearsal.machines.processes import end_processes, list_processes, stop_process

REPOSITORY = Path(__file__).parent.parent.parent
SHIMS = Path(__file__).parent / "bin"
EBS = "Amazon Elastic Block Store"
# Whatever would keep the SDKs from asking the metadata service for credentials.
NOT_PASSED_ON = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_EC2_METADATA_DISABLED",
)
FOLDERS = (
    "etc/training",
    "opt",
    "run",
    "sys/disks",
    "tmp",
    "var/lib/cloud/data",
    "var/lib/cloud/instance",
    "var/log/training",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """One NVMe disk as the machine's programs see it; `signatures` is what wipefs would find."""

    name: str
    model: str = EBS
    serial: str
    device_name: str
    holds_root: bool = False
    mounted: str | None = None
    signatures: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)


# The data volume comes first on purpose: whoever trusts kernel names formats the wrong disk.
EC2_DISKS = (
    Disk(name="nvme0n1", serial="vol0d1a2b3c4d5e6f708", device_name="sdf"),
    Disk(
        name="nvme1n1",
        serial="vol00112233445566778",
        device_name="sda1",
        holds_root=True,
        signatures=("gpt",),
    ),
)


@dataclass(kw_only=True, slots=True)
class ProcessMachine:
    """One machine in `folder`, which has to be empty or new; `environment` names its AWS.

    `pytorch` is the virtual environment that stands for the Deep Learning AMI's /opt/pytorch.
    """

    folder: Path
    instance_id: str
    instance_type: str
    user_data: bytes
    environment: Mapping[str, str]
    metadata: MetadataServer
    pytorch: Path = field(default_factory=lambda: Path(sys.prefix))
    disks: Sequence[Disk] = EC2_DISKS
    _init: subprocess.Popen[bytes] | None = None
    _leash: int | None = None
    _lines: list[str] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    @property
    def boot_log(self) -> Path:
        """Everything that the user data and the boot steps wrote."""
        return self.folder / "var/log/cloud-init-output.log"

    @property
    def training_log(self) -> Path:
        """Everything that the trainer wrote."""
        return self.folder / "var/log/training/training.log"

    @property
    def metrics_file(self) -> Path:
        """JSON lines that the trainer appends."""
        return self.folder / "var/log/training/metrics.jsonl"

    def start(self) -> None:
        """Power on: serve the metadata, run the user data in a session of its own; do not wait."""
        if self._init is not None:
            raise ValueError(f"the machine in {self.folder} was started before; take a new folder")
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty; a new machine has empty disks")
        self.metadata.start()
        self._furnish()
        reader, self._leash = os.pipe()
        with (self.folder / "var/log/init.log").open("ab") as log:
            self._init = subprocess.Popen(
                [sys.executable, "-m", "rehearsal.machines.init", str(self._root), str(reader)],
                cwd=REPOSITORY,
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(reader,),
            )
        os.close(reader)

    def notice(self, seconds: float) -> None:
        """Announce in the metadata that the machine goes away in so many seconds."""
        self.metadata.notice(seconds)

    def rebalance(self) -> None:
        """Recommend in the metadata to rebalance."""
        self.metadata.rebalance()

    def processes(self) -> list[psutil.Process]:
        """The living processes of the machine."""
        return [] if self._init is None else list_processes(self._init.pid)

    def kill(self) -> int:
        """SIGKILL to everything until nothing is left; return how many processes that were."""
        if self._init is None:
            return 0
        count = 0
        if self._init.poll() is None:
            # Frozen first: it must not restart services or run ExecStopPost=, as nothing does when
            # the power is cut. Ended last: as long as it lives no orphan is lost from sight.
            stop_process(self._init.pid)
            count = end_processes(self._init.pid) + 1
            self._init.kill()
            self._init.wait()
        count += end_processes(self._init.pid)
        self._release()
        return count

    def power_off(self, seconds: float = 30.0) -> None:
        """Shut down as systemd does: services stop and may save, then everything is killed."""
        if self._init is not None and self._init.poll() is None:
            self._init.send_signal(signal.SIGTERM)
            try:
                self._init.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
        self.kill()

    def log_lines(self) -> list[str]:
        """The lines of boot and training so far, in the order in which they were seen here."""
        for path in (self.boot_log, self.training_log):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # Its writer is in the middle of this line.
                    self._read[path] = self._read.get(path, 0) + len(raw)
                    self._lines.append(raw.decode(errors="replace").rstrip())
        return self._lines

    def wait(self, seconds: float, log_has: str) -> bool:
        """Wait until a line with the text is in the log; False if none came."""
        give_up_at = time.monotonic() + seconds
        while not any(log_has in line for line in self.log_lines()):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(0.05)
        return True

    def remove(self) -> None:
        """Kill what is left and delete the folder with all disks."""
        self.kill()
        if self.folder.exists():
            shutil.rmtree(self.folder)

    @property
    def _root(self) -> Path:
        return self.folder.resolve()

    def _furnish(self) -> None:
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "opt/pytorch").symlink_to(self.pytorch.resolve())
        for disk in self.disks:
            content = json.dumps(asdict(disk), indent=1)
            (self.folder / f"sys/disks/{disk.name}.json").write_text(content + "\n")
        (self.folder / "var/lib/cloud/data/instance-id").write_text(f"{self.instance_id}\n")
        user_data = self.folder / "var/lib/cloud/instance/user-data.txt"
        user_data.write_bytes(self.user_data)
        user_data.chmod(0o700)
        (self.folder / "run/machine.json").write_text(json.dumps(self._environment(), indent=1))

    def _environment(self) -> dict[str, str]:
        """All that the machine's processes get; their credentials come from the metadata alone."""
        nowhere = str(self._root / "nowhere")
        path = (str(SHIMS), str(self._root / "opt/pytorch/bin"), "/usr/bin", "/bin")
        return {
            **{k: v for k, v in self.environment.items() if k not in NOT_PASSED_ON},
            "PATH": os.pathsep.join(path),
            "LANG": "C.UTF-8",
            "HOME": str(self._root),
            "TMPDIR": str(self._root / "tmp"),
            "MACHINE_ROOT": str(self._root),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.metadata.endpoint,
            "AWS_CONFIG_FILE": nowhere,
            "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        }

    def _release(self) -> None:
        self.metadata.close()
        if self._leash is not None:
            os.close(self._leash)
            self._leash = None
