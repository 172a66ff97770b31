"""The disks of a process machine: a JSON file each, which its disk programs (disks.py) read."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from rehearsal.machines.commands import failure
from rehearsal.machines.machine import PYTORCH, RehearsedMachine
from rehearsal.machines.processes import freeze_process, kill_processes, list_processes
from rehearsal.machines.quirks import (
    EBS,
    KEPT,
    KEPT_TEXT,
    PARTITION_TABLE,
    PROGRAMS,
    Volume,
    lend_environment,
    lend_folder,
)
from rehearsal.machines.services import NOTIFY, SOCKETS


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonDisk:
    """One NVMe disk as the machine's programs see it; `signatures` is what wipefs finds."""

    name: str
    model: str = EBS
    serial: str
    device_name: str
    holds_root: bool = False
    mounted: str | None = None
    signatures: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    appears_at: float = 0.0  # in the seconds of time.time()


# The data volume comes first on purpose: whoever trusts kernel names formats the wrong disk.
EC2_DISKS = (
    JsonDisk(name="nvme0n1", serial="vol0d1a2b3c4d5e6f708", device_name="sdf"),
    JsonDisk(
        name="nvme1n1",
        serial="vol00112233445566778",
        device_name="sda1",
        holds_root=True,
        signatures=("gpt",),
    ),
)


def disks_of(volumes: Sequence[Volume]) -> list[JsonDisk]:
    """Return the disks of a machine that powers on now."""
    numbers = (0, *range(2, len(volumes) + 1))
    named = zip(numbers, volumes, strict=False)
    return [EC2_DISKS[1], *(_disk(f"nvme{number}n1", volume) for number, volume in named)]


def _disk(name: str, volume: Volume) -> JsonDisk:
    kind = {PARTITION_TABLE: "dos"}.get(volume.content, volume.content)
    is_file_system = volume.content not in ("", PARTITION_TABLE)
    return JsonDisk(
        name=name,
        serial=f"vol0d1a2b3c4d5e6f7{name[4:-2]:0>2}",
        device_name=volume.device_name,
        signatures=(kind,) if kind else (),
        tags={"TYPE": kind, "UUID": str(uuid.uuid4())} if is_file_system else {},
        appears_at=time.time() + volume.late_seconds if volume.late_seconds else 0.0,
    )


def write_disks(folder: Path, disks: Sequence[JsonDisk], *, filled: bool) -> None:
    """Write each disk's JSON file and, if `filled`, the files on disks with a file system."""
    for disk in disks:
        text = json.dumps(asdict(disk), indent=1)
        (folder / f"{disk.name}.json").write_text(text + "\n")
        if filled and "UUID" in disk.tags:
            (folder / disk.name).mkdir()
            (folder / disk.name / KEPT).write_text(KEPT_TEXT)


REPOSITORY = Path(__file__).parent.parent.parent
INIT = "rehearsal.machines.init"
SHIMS, LENT_SHIMS = Path(__file__).parent / "bin", "opt/programs"
# Variables that would keep the SDKs from getting credentials from the metadata service.
NOT_PASSED_ON = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE",
    "AWS_EC2_METADATA_DISABLED",
)  # fmt: skip
FOLDERS = (
    "etc/training", "opt", "run", "sys/disks", "tmp", "var/lib/cloud/data",
    "var/lib/cloud/instance", "var/log/training",
)  # fmt: skip


@dataclass(kw_only=True)
class ProcessMachine(RehearsedMachine):
    """One machine as a process tree; `environment` names its AWS."""

    environment: Mapping[str, str]
    disks: Sequence[JsonDisk] | None = None  # None: those of the quirks
    # A short name for its tmp: a Unix socket's path has at most 107 bytes.
    _tmp: Path = field(default_factory=lambda: Path(f"/tmp/machine-{uuid.uuid4().hex[:8]}"))
    _init: subprocess.Popen[bytes] | None = None
    _rehearsal: socket.socket | None = None

    @property
    def user_data_file(self) -> Path:
        """The user data that the machine runs."""
        return self.root / "var/lib/cloud/instance/user-data.txt"

    def start(self) -> None:
        """Power on without waiting: serve the metadata, run the user data in its own session."""
        if self._init is not None:
            raise ValueError(f"the machine in {self.folder} was already started; use a new folder")
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty; a new machine has empty disks")
        self.quirks.check_for_process_machine()
        self.metadata.start()
        self._furnish()
        self._rehearsal, inits_end = socket.socketpair()
        with (self.folder / "var/log/init.log").open("ab") as log:
            self._init = subprocess.Popen(
                [sys.executable, "-m", INIT, str(self.root), str(inits_end.fileno())],
                cwd=REPOSITORY,
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(inits_end.fileno(),),
            )
        inits_end.close()

    def processes(self) -> list[psutil.Process]:
        """List the running processes of the machine."""
        return [] if self._init is None else list_processes(self._init.pid)

    def kill(self) -> int:
        """Kill everything until nothing is left; return the number of processes killed."""
        if self._init is None:
            return 0
        count = 0
        if self._init.poll() is None:
            # Init is frozen first: it must not restart services or run ExecStopPost=, which cannot
            # happen when the power is cut. It is killed last, as it adopts orphans until then.
            freeze_process(self._init.pid)
            count = kill_processes(self._init.pid) + 1
            self._init.kill()
            self._init.wait()
        count += kill_processes(self._init.pid)
        for left in SOCKETS.glob(f"{NOTIFY}{self._init.pid}-*"):
            shutil.rmtree(left, ignore_errors=True)
        self._release()
        return count

    def shut_down(self) -> None:
        """Begin to shut down as systemd does, without waiting: services stop and may save."""
        if self._init is not None and not self.is_off:
            self._init.send_signal(signal.SIGTERM)

    @property
    def is_off(self) -> bool:
        """Whether the first process, which ends last, does not run."""
        return self._init is None or self._init.poll() is not None

    def execute(self, *command: str) -> str:
        """Run a program in the machine, by its init; return what it printed."""
        assert self._rehearsal is not None, "execute needs a machine that is on"
        try:
            self._rehearsal.sendall(json.dumps(command).encode() + b"\n")
            with self._rehearsal.makefile("rb") as answers:
                line = answers.readline()
        except ConnectionError:
            line = b""
        if not line:
            raise failure(command, -signal.SIGKILL, "the machine powered off while it ran")
        reply = json.loads(line)
        if reply["status"] != 0:
            raise failure(command, reply["status"], reply["error"] or reply["output"])
        return str(reply["output"])

    def remove(self) -> None:
        """Kill everything that is left and delete the folder with all disks."""
        self.kill()
        if self.folder.exists():
            shutil.rmtree(self.folder)

    @property
    def _path(self) -> str:
        shims = self.root / LENT_SHIMS if self.quirks.lacks else SHIMS
        return f"{shims}:{self.root / 'opt/pytorch/bin'}:/usr/bin:/bin"

    def _furnish(self) -> None:
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._tmp.symlink_to(self.root / "tmp")
        pytorch = self.root / "opt/pytorch"
        if self.quirks.lacks:
            lend_environment(PYTORCH, pytorch, self.quirks.lacks)
            lend_folder(SHIMS, self.root / LENT_SHIMS, self.quirks.lacks)
        else:
            pytorch.symlink_to(PYTORCH)
        self.quirks.write_programs(
            self.root / PROGRAMS, lambda name: shutil.which(name, path=self._path) or ""
        )
        self.quirks.write_files(self.root, lambda name: name.lstrip("/"))
        if self.disks is None:
            write_disks(self.folder / "sys/disks", disks_of(self.quirks.volumes), filled=True)
        else:
            write_disks(self.folder / "sys/disks", self.disks, filled=False)
        (self.folder / "var/lib/cloud/data/instance-id").write_text(f"{self.instance_id}\n")
        self.user_data_file.write_bytes(self.metadata.instance.user_data)
        self.user_data_file.chmod(0o700)
        (self.folder / "run/machine.json").write_text(json.dumps(self._environment(), indent=1))

    def _environment(self) -> dict[str, str]:
        """Return its processes' complete environment; credentials come only from the metadata."""
        nowhere = str(self.root / "nowhere")
        return {
            **self.quirks.environment,
            **{k: v for k, v in self.environment.items() if k not in NOT_PASSED_ON},
            "PATH": self.quirks.path(self.root, self._path),
            "LANG": "C.UTF-8",
            # Threads wait without spinning, as machines share the host's cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            "HOME": str(self.root),
            "TMPDIR": str(self._tmp),
            "MACHINE_ROOT": str(self.root),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.metadata.endpoint,
            "AWS_CONFIG_FILE": nowhere,
            "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        }

    def _release(self) -> None:
        self._tmp.unlink(missing_ok=True)
        self.metadata.close()
        if self._rehearsal is not None:
            self._rehearsal.close()
            self._rehearsal = None
