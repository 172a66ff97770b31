"""A training job of several hosts, each in a network of its own, cut off and told to end.

Root on Linux only: each host is a network namespace with an address and a folder like /opt/ml.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.training.runs import ROOT, WORKLOAD, Run, wait_for
from training.record.head import read_head
from training.store.folder import open_store

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

    def end(self) -> None:
        """As SageMaker ends a container: all its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_NAMESPACES, reason="network namespaces take root on Linux")
def test_four_hosts_of_two_ranks_and_then_two_of_four_give_the_bits_of_one_rank(
    dataset: Path, finished: Callable[..., Run], tmp_path: Path
) -> None:
    whole = finished(*(f"--override={name}={value}" for name, value in _SMALL.items()))
    given = {
        "workload": WORKLOAD,
        "recipe": "quick",
        "run-uri": str(tmp_path / "runs" / "run-1"),
        "dataset-uri": str(dataset),
        "checkpoint-interval": "2steps",
        "lease-ttl-seconds": "2",
        "step_seconds": "0.2",
        **_SMALL,
    }
    store = open_store(given["run-uri"])

    def committed() -> int:
        head = read_head(store)
        return head.checkpoints[-1].step if head and head.checkpoints else 0

    with _networks(4) as networks, ExitStack() as stack:

        def start(number: int, ranks: int) -> list[_Container]:
            hosts = [f"10.77.0.{k}" for k in range(1, number + 1)]
            found = []
            for network, own in zip(networks, hosts, strict=False):
                folder = tmp_path / f"ml-{number}" / own
                more = {**given, "num-processes": str(ranks)}
                found.append(_Container(network, folder, hosts, own, **more))
            return found

        job = start(4, 2)
        for container in job:
            stack.callback(container.end)
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
        head = read_head(store)
        assert head is not None and head.state == "released"
        for container in job:
            container.end()
        stack.pop_all()
        job = start(2, 4)
        for container in job:
            stack.callback(container.end)
        codes = [container.process.wait(300) for container in job]
        assert codes == [0, 0], [container.said for container in job]
        stack.pop_all()
    model = tmp_path / "ml-2" / "10.77.0.1" / "model"
    receipt = json.loads((model / "receipt.json").read_text())
    assert receipt["weights_sha256"] == whole.head.weights_sha256
    assert not (tmp_path / "ml-2" / "10.77.0.2" / "model" / "receipt.json").exists()
