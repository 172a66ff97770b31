"""A host of a job: the entry point of its container, and the trainer that this starts.

Real are the rules by which training/cli/sagemaker.py starts a trainer again and waits for its end;
its process, signals and log are stubbed here, and the network in sockets.py.
"""

import math
import re
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation import collectives, sockets
from tests.simulation.bucket import SimulatedStore
from tests.simulation.clock import CLOCK, PoweredOffError, Process, sleep
from tests.simulation.collectives import Meeting
from tests.simulation.ranks import RankedAttempt, RankedHost
from tests.simulation.stubs import place_of
from tests.stacks.guard.world import Machine
from training.cli import run as run_file
from training.cli import sagemaker
from training.durable.attempt.ranks import Hosts
from training.durable.attempt.supervisor import Supervisor
from training.durable.attempt.world import RankEnvironment
from training.durable.errors import AttemptEndedError
from training.durable.save.tensors import policy as policy_file

if TYPE_CHECKING:
    from tests.simulation.jobs import JobWorld

NOTICE_SECONDS = 120.0
_ASKED = SimpleNamespace(override=[], source=None, workload="simulated", recipe="laptop")


class _Store(SimulatedStore):
    def get_file(self, key: str, path: Path) -> None:
        stored = self.get(key)
        if stored is None:
            raise FileNotFoundError(key)


class Container(RankedHost):
    """One host of a job."""

    world: "JobWorld"  # type: ignore[assignment]

    def __init__(self, world: "JobWorld", name: str, machine: Machine) -> None:
        super().__init__(world, machine)  # type: ignore[arg-type]
        self.name, self.names, self.ranks = name, world.names, world.ranks_each
        self.ports: dict[int, Any] = {}
        self.handler: Any = None  # of SIGTERM
        self.is_off = self.is_gone = self.is_done = False
        self.noticed_at = math.inf
        self.data = "d"  # the fingerprint of its dataset
        self.codes: list[int] = []  # of its trainers
        self.num_own = 0  # of what may fail its trainers, besides the loss of other hosts
        self.is_given_up = False  # by SageMaker, which has started another one
        self.unreachable_until = self.dark_until = 0.0  # for the others; S3 for it

    def _boot(self) -> None:
        job = sagemaker._SageMakerJob(
            root=self.folder,
            arguments=("run",),
            run_uri="s3://runs/run-1",
            notice_seconds=NOTICE_SECONDS,
            model_folder=self.folder / "model",
            dataset=self.folder,
            leads=self.name == self.names[0],
            variables={},
        )
        try:
            code = int(sagemaker._train(job))
        except PoweredOffError:
            raise
        except Exception as error:  # as training/cli/main.py has it
            self.world.tell(f"{self.name}: {place_of(error)}")
            code = 1
        self.process.end(code)

    @property
    def is_running(self) -> bool:
        """Whether it is one that SageMaker knows, and has not ended."""
        return not (self.is_gone or self.is_done or self.is_given_up)

    def begin(self, trainer: Process) -> int:
        sleep(CLOCK.luck.uniform(0.1, 0.5))
        return HostAttempt(self, trainer).run()

    def has_ended(self, code: int) -> None:
        """Its trainer has."""
        self.step = None
        self.world.tell(f"{self.name} trainer ends: {code}")
        self.world.judge_code(self, code)

    def says(self, text: str) -> None:
        """A line of its log."""
        said = text.removeprefix("[sagemaker] ").replace(f"{self.folder}/", "")
        self.world.tell(f"{self.name}: {said}")
        if (named := re.search("its last commit is of step ([0-9]+)", text)) is not None:
            self.world.judge_named(self, int(named[1]))

    def signal(self) -> None:
        """SIGTERM, which the first process of a container does not hear without a handler."""
        if self.handler is not None and not self.process.is_dead:
            CLOCK.start(self.process, lambda: self.handler and self.handler(signal.SIGTERM, None))

    def _signal(self, name: str) -> None:
        if self.trainer is not None and self.trainer.supervisor is None:
            self.trainer.end(-signal.SIGTERM)
        else:
            super()._signal(name)

    def reaches(self, other: RankedHost) -> bool:
        if self is other:
            return True
        hosts: list[Any] = [self, other]
        if CLOCK.now < self.world.cuts.get(frozenset(one.name for one in hosts), 0.0):
            return False
        return not any(one.is_off or CLOCK.now < one.unreachable_until for one in hosts)

    def meeting_at(self, address: str, size: int) -> Meeting:
        found = self.world.meetings
        if address not in found:
            found[address] = Meeting(self, size, is_gpu=self.world.plan.is_gpu)
        first: Any = found[address].host
        if first.data != self.data:
            self.world.breaks("all hosts train on the same data", f"{first.name} and {self.name}")
        return found[address]

    def _judge_hang(self, trainer: Process, rank: int) -> None:
        for host in self.world.network.hosts.values():
            if host.trainer is not None and host.trainer.meeting is trainer.meeting:
                judge = partial(super()._judge_hang, host.trainer, rank)
                CLOCK.start(self.world.process, judge)


class HostAttempt(RankedAttempt):
    """The trainer of one host, as training/cli/run.py and run_workload have it."""

    host: Container

    def lead(self, supervisor: Supervisor) -> int:
        host, process = self.host, self.process
        process.attempt = self
        CLOCK.start(self.world.process, lambda: collectives.watch(process))
        if run_file._is_same_finished_run(_ASKED, self.options.store):  # type: ignore[arg-type]
            return 0
        sleep(CLOCK.luck.uniform(1, 20))  # the dataset is verified
        hosts = Hosts.parse(f"{host.name}@{','.join(host.names)}")
        process.rank = hosts.number * host.ranks if hosts else 0
        facts = {"dataset": host.data, "run": "s3://runs/run-1"}
        meeting = RankEnvironment(hosts=hosts).meeting(
            supervisor, host.ranks, host.folder, facts, arguments=(), start=self._start
        )
        try:
            with meeting as place:
                if place.world_size == 1:
                    process.meeting = Meeting(host, 1, is_gpu=self.plan.is_gpu)
                return self._as_rank(place, supervisor, self.options)
        except (RuntimeError, OSError) as error:
            is_unnamed = type(error) is not AttemptEndedError and _is_of_network(error)
            host.num_own += is_unnamed or "did not come within" in str(error)
            if not is_unnamed:
                raise
            self.world.facts["unnamed losses"] += 1
            raise AttemptEndedError(str(error)) from error  # Python ends with 1, too


def _is_of_network(error: Exception) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or "closed by peer" in str(error)


class _Trainer:
    """subprocess.Popen, of a container's command."""

    def __init__(self, command: Any, **_: Any) -> None:
        own = CLOCK.process
        self._host: Container = own.supervisor
        trainer = Process(name=self._host.machine.id, clock_off=own.clock_off)
        self._host.trainer, self._trainer, self.stderr = trainer, trainer, self
        own.children.append(trainer)
        CLOCK.start(trainer, lambda: trainer.end(self._host.begin(trainer)))

    @property
    def returncode(self) -> int | None:
        return self._trainer.code

    def wait(self) -> int:
        self._trainer.ended.wait()
        code = self._trainer.code
        assert code is not None
        self._host.has_ended(code)
        return code

    def send_signal(self, sig: int) -> None:
        self._host._signal("SIGTERM")

    def readline(self, most: int) -> bytes:
        self._trainer.ended.wait()
        return b""

    def __enter__(self) -> "_Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        return


def _signal(number: int, handler: Any) -> Any:
    own: Container = CLOCK.process.supervisor
    own.handler, before = handler, own.handler
    return before


def _say(text: str, **_: Any) -> None:
    CLOCK.process.supervisor.says(text)


def _open_store(uri: str) -> _Store:
    own: Container = CLOCK.process.supervisor
    return _Store(own.world, own.machine.id)  # type: ignore[arg-type]


def _hostname() -> str:
    name: str = CLOCK.process.supervisor.host.name
    return name


_SIGNAL = SimpleNamespace(signal=_signal, SIGTERM=signal.SIGTERM, Signals=signal.Signals)
_SUBPROCESS = SimpleNamespace(Popen=_Trainer, DEVNULL=-3, PIPE=-1)
STUBS: tuple[tuple[Any, str, Any], ...] = (
    *sockets.STUBS,
    (sagemaker, "signal", _SIGNAL),
    (sagemaker, "subprocess", _SUBPROCESS),
    (sagemaker, "print", _say),
    (sagemaker, "open_store", _open_store),
    (policy_file, "socket", SimpleNamespace(gethostname=_hostname)),
)
