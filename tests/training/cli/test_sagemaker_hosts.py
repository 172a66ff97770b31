"""A training job of several hosts, each in a network of its own, cut off and told to end.

Root on Linux only: each host is a network namespace with an address and a folder like /opt/ml.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.training.runs import ROOT, WORKLOAD, KeptRun, Run, wait_for
from training.record.head import read_head

# Eight micro-batches a step, so that eight ranks have one each.
_SMALL = {"micro_batch": "1", "batch_norm": "false"}
_HAS_NAMESPACES = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def _networks(number: int) -> Iterator[list[str]]:
    """Network namespaces on one bridge; host K has the address 10.77.0.K on its eth0."""
    own = f"t{os.getpid() % 100_000}"
    with ExitStack() as stack:
        bridge = f"{own}b"
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        names = [f"{own}-{k}" for k in range(1, number + 1)]
        for k, name in enumerate(names, start=1):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            outside = f"{own}v{k}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", outside, "master", bridge, "up")
            for words in (
                ["addr", "add", f"10.77.0.{k}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                _ip("-n", name, *words)
        yield names


class _Container:
    """One host of a job, as SageMaker starts it."""

    def __init__(self, network: str, root: Path, hosts: Sequence[str], own: str, **more: str):
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        (root / "tmp").mkdir(parents=True)
        config = root / "input" / "config"
        config.mkdir(parents=True)
        resources = {"current_host": own, "hosts": hosts, "network_interface_name": "eth0"}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        (config / "hyperparameters.json").write_text(json.dumps(more))
        self._output = root / "output.txt"
        command = ["-m", "training", "sagemaker", f"--ml-root={root}", "train"]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", network, sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(root / "tmp"), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._output.read_text()

    def processes(self) -> list[int]:
        """Those of its ranks, not the one that starts them again."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_here = os.getsid(int(folder.name)) == self.process.pid
                if is_here and b"\0run\0" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    def end(self) -> None:
        """As SageMaker ends a container: all its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class _Job(KeptRun):
    """A run that a job of several hosts trains, started as often as SageMaker would."""

    def __init__(self, root: Path, networks: Sequence[str], dataset: Path, name: str) -> None:
        self.root = root / name
        self.uri = str(root / "runs" / name)
        self._networks = networks
        self._given = {
            "workload": WORKLOAD,
            "recipe": "quick",
            "run-uri": self.uri,
            "dataset-uri": str(dataset),
            "checkpoint-interval": "2steps",
            "lease-ttl-seconds": "2",
            "step_seconds": "0.2",
            **_SMALL,
        }

    def committed(self) -> int:
        """The step of the last commit, 0 before there is one."""
        head = read_head(self.store)
        return head.checkpoints[-1].step if head and head.checkpoints else 0

    def is_finished(self) -> bool:
        head = read_head(self.store)
        return head is not None and head.state == "finished"

    def start(self, stack: ExitStack, number: int, ranks: int) -> list[_Container]:
        """Start all hosts; they end with `stack`."""
        hosts = [f"10.77.0.{k}" for k in range(1, number + 1)]
        found = []
        for network, own in zip(self._networks, hosts, strict=False):
            folder = self.root / f"ml-{number}" / own
            more = {**self._given, "num-processes": str(ranks)}
            found.append(_Container(network, folder, hosts, own, **more))
            stack.callback(found[-1].end)
        return found


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_NAMESPACES, reason="network namespaces take root on Linux")
def test_four_hosts_of_two_ranks_and_then_two_of_four_give_the_bits_of_one_rank(
    dataset: Path, finished: Callable[..., Run], tmp_path: Path
) -> None:
    whole = finished(*(f"--override={name}={value}" for name, value in _SMALL.items()))
    with _networks(4) as networks, ExitStack() as stack:
        run = _Job(tmp_path, networks, dataset, "run-1")
        committed = run.committed
        job = run.start(stack, 4, 2)
        wait_for(lambda: committed() >= 2)
        # Cut off: both sides find out, and the others wait for it.
        _ip("-n", networks[2], "link", "set", "eth0", "down")
        wait_for(lambda: all("trying again" in container.said for container in job))
        before = committed()
        _ip("-n", networks[2], "link", "set", "eth0", "up")
        wait_for(lambda: committed() > before)
        # A notice to one: it waits for its end, the others for it.
        job[1].process.send_signal(signal.SIGTERM)  # `ip netns exec` becomes the container
        wait_for(lambda: "this container waits for its end" in job[1].said)
        wait_for(lambda: all("another host ends" in job[k].said for k in (0, 2, 3)))
        assert "saved; this container" in job[1].said
        assert run.head.state == "released"
        stack.close()
        job = run.start(stack, 2, 4)
        codes = [container.process.wait(300) for container in job]
        assert codes == [0, 0], [container.said for container in job]
    model = run.root / "ml-2" / "10.77.0.1" / "model"
    receipt = json.loads((model / "receipt.json").read_text())
    assert receipt["weights_sha256"] == whole.head.weights_sha256
    assert not (run.root / "ml-2" / "10.77.0.2" / "model" / "receipt.json").exists()


class _Torment:
    """Hits a job of four hosts at drawn moments; as SageMaker, starts all again where one ends."""

    def __init__(self, run: _Job, networks: Sequence[str], draws: random.Random) -> None:
        self._run = run
        self._networks = networks
        self._draws = draws
        self.hits: list[str] = []

    def until_finished(self, most: int) -> None:
        """At most so many hits."""
        with ExitStack() as stack:
            job = self._run.start(stack, 4, 2)
            while not self._run.is_finished():
                if len(self.hits) < most:
                    self._wait()
                    if self._hit(job):
                        stack.close()
                        job = self._run.start(stack, 4, 2)
                else:
                    time.sleep(0.5)
            assert [container.process.wait(120) for container in job] == [0] * 4

    def _wait(self) -> None:
        """Until a moment of the start, or after a commit."""
        before = self._run.committed()
        if self._draws.random() < 0.75:
            wait_for(lambda: self._run.committed() > before or self._run.is_finished())
            time.sleep(self._draws.uniform(0.0, 1.5))
        else:
            time.sleep(self._draws.uniform(0.0, 12.0))

    def _hit(self, job: list[_Container]) -> bool:
        """Do what was drawn; whether SageMaker starts all hosts again after it."""
        if self._run.is_finished():
            return False
        place = self._draws.randrange(4)
        kind = self._draws.choice(["host", "rank", "notice", "partition"])
        self.hits.append(kind)
        if kind == "host":
            job[place].end()
            time.sleep(self._draws.uniform(0.0, 5.0))
        elif kind == "rank":
            if pids := job[place].processes():
                with suppress(ProcessLookupError):
                    os.kill(self._draws.choice(pids), signal.SIGKILL)
        elif kind == "notice":
            job[place].process.send_signal(signal.SIGTERM)
            time.sleep(self._draws.uniform(0.0, 20.0))
        else:
            _ip("-n", self._networks[place], "link", "set", "eth0", "down")
            time.sleep(self._draws.uniform(1.0, 15.0))
            _ip("-n", self._networks[place], "link", "set", "eth0", "up")
        return kind in ("host", "notice") and not self._run.is_finished()


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_NAMESPACES, reason="network namespaces take root on Linux")
def test_hosts_hit_fifty_times_at_drawn_moments_give_the_bits_of_one_rank(
    dataset: Path, finished: Callable[..., Run], tmp_path: Path
) -> None:
    """HITS and SEED in the environment draw others."""
    whole = finished(*(f"--override={name}={value}" for name, value in _SMALL.items()))
    most, draws = int(os.environ.get("HITS", "50")), random.Random(os.environ.get("SEED", "37"))
    hits: list[str] = []
    with _networks(4) as networks:
        for number in itertools.count(1):
            run = _Job(tmp_path, networks, dataset, f"run-{number}")
            torment = _Torment(run, networks, draws)
            torment.until_finished(min(12, most - len(hits)))
            hits += torment.hits
            print(f"run {number}: {len(hits)} of {most} hits, last {torment.hits}", flush=True)
            assert run.head.weights_sha256 == whole.head.weights_sha256
            if len(hits) >= most:
                break
    assert most < 20 or set(hits) == {"host", "rank", "notice", "partition"}
