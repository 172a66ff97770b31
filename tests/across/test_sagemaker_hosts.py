"""A training job of several hosts, each in a network of its own, cut off and told to end.

Root on Linux only: the embedded SageMaker gives each host a network namespace.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from embedded_aws.job_network import JobNetwork, has_namespaces
from embedded_aws.training_jobs import JobContainer, TrainingJob
from tests.training.runs import WORKLOAD, KeptRun, Run
from training.durable.record.head import Head

# Eight micro-batches a step, so that eight ranks have one each.
_SMALL = {"micro_batch": "1", "batch_norm": "false"}
_HOSTS = [f"algo-{k}" for k in range(1, 5)]
_in_namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="network namespaces take root on Linux"
)


def _until(job: TrainingJob, is_so: Callable[[], bool]) -> None:
    """As SageMaker, look after the job until it is so; if never, the test runs out of time."""
    while not is_so():
        job.step()
        time.sleep(0.02)


def _rest(job: TrainingJob, seconds: float) -> None:
    end = time.monotonic() + seconds
    _until(job, lambda: time.monotonic() > end)


def _network(job: TrainingJob) -> JobNetwork:
    assert job.network is not None
    return job.network


def _ranks(container: JobContainer) -> list[int]:
    """The processes of its ranks, not the one that starts them again."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_here = os.getsid(int(folder.name)) == container.process.pid
            if is_here and b"\0run\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


class _Trained(KeptRun):
    """A run that jobs of several hosts train, one after the other."""

    def __init__(self, root: Path, dataset: Path, name: str) -> None:
        self.uri = str(root / "runs" / name)
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
        head = Head.read(self.store)
        return head.checkpoints[-1].step if head and head.checkpoints else 0

    def is_finished(self) -> bool:
        head = Head.read(self.store)
        return head is not None and head.state == "finished"

    def submit(self, stack: ExitStack, number: int, ranks: int) -> TrainingJob:
        """A job of so many hosts; it leaves nothing when `stack` ends."""
        instances = {"InstanceType": "ml.g5.xlarge", "InstanceCount": number}
        job = TrainingJob(
            arn="arn:aws:sagemaker:us-east-1:123456789012:training-job/hosts",
            request={
                "HyperParameters": {**self._given, "num-processes": str(ranks)},
                "ResourceConfig": instances,
                "StoppingCondition": {"MaxRuntimeInSeconds": 86_400},
            },
            environment={"OMP_NUM_THREADS": "1"},
            notice_seconds=120.0,
        )
        stack.callback(job.forget)
        return job


@pytest.mark.slow
@_in_namespaces
def test_four_hosts_of_two_ranks_and_then_two_of_four_give_the_bits_of_one_rank(
    dataset: Path, finished: Callable[..., Run], tmp_path: Path
) -> None:
    whole = finished(*(f"--override={name}={value}" for name, value in _SMALL.items()))
    with ExitStack() as stack:
        run = _Trained(tmp_path, dataset, "run-1")
        committed = run.committed
        job = run.submit(stack, 4, 2)
        _until(job, lambda: committed() >= 2)
        # Cut off: both sides find out, and the others wait for it.
        _network(job).cut("algo-3", is_cut=True)
        said = "another host is ending"
        _until(job, lambda: all(said in job.log(host) for host in _HOSTS))
        before = committed()
        _network(job).cut("algo-3", is_cut=False)
        _until(job, lambda: committed() > before)
        # A notice to one: it waits for its end, the others for it.
        job.signal("interruption", "algo-2")
        _until(job, lambda: "this container waits for its end" in job.log("algo-2"))
        others = [host for host in _HOSTS if host != "algo-2"]
        _until(job, lambda: all(job.log(host).count(said) > 1 for host in others))
        assert "its last commit is of step" in job.log("algo-2")
        assert run.head.state == "released" and job.num_starts == 1
        # Then SageMaker starts all of them again by itself.
        job.notice_seconds, before = 0.0, committed()
        _until(job, lambda: job.num_starts == 2 and committed() > before)
        job.forget()
        job = run.submit(stack, 2, 4)
        _until(job, lambda: job.is_over)
        assert job.status == "Completed", job.log()
        assert job.folder is not None
        assert run.json("receipt.json")["weights_sha256"] == whole.head.weights_sha256
        left = {path.parent.parent.name for path in job.folder.glob("*/model/receipt.json")}
        assert left == {"algo-1"}


class _Torment:
    """Hits a job of four hosts at drawn moments, until its run has finished."""

    def __init__(self, run: _Trained, draws: random.Random) -> None:
        self._run = run
        self._draws = draws
        self.hits: list[str] = []

    def until_finished(self, most: int) -> None:
        """At most so many hits; a job that was lost is submitted again."""
        with ExitStack() as stack:
            job = self._run.submit(stack, 4, 2)
            while job.status != "Completed":
                if len(self.hits) < most and not job.ending and not self._is_over(job):
                    self._wait(job)
                    self._hit(job)
                _rest(job, 0.2)
                if job.status == "Failed":
                    # Three failures without a restart are no coincidence to a container; what it
                    # calls a mistake is none of ours.
                    is_ours = job.ending == "loss" or self.hits[-1] in ("rank", "partition")
                    assert is_ours and "exit code: 2" not in job.reason, job.reason + job.log()
                    job.forget()
                    job = self._run.submit(stack, 4, 2)

    def _wait(self, job: TrainingJob) -> None:
        """Until a moment of the start, or after a commit."""
        before = self._run.committed()
        if self._draws.random() < 0.75:
            _until(job, lambda: self._run.committed() > before or self._is_over(job))
            _rest(job, self._draws.uniform(0.0, 1.5))
        else:
            _rest(job, self._draws.uniform(0.0, 12.0))

    def _is_over(self, job: TrainingJob) -> bool:
        return job.is_over or self._run.is_finished()

    def _hit(self, job: TrainingJob) -> None:
        if self._is_over(job) or not job.containers:
            return
        container = self._draws.choice(job.containers)
        kind = self._draws.choice(["host", "rank", "notice", "partition"])
        self.hits.append(kind)
        if kind == "host":
            job.notice_seconds = self._draws.uniform(0.0, 5.0)
            job.lose(container.host)
        elif kind == "rank":
            if pids := _ranks(container):
                with suppress(ProcessLookupError):
                    os.kill(self._draws.choice(pids), signal.SIGKILL)
        elif kind == "notice":
            job.notice_seconds = self._draws.uniform(0.0, 20.0)
            job.signal("interruption", container.host)
        else:
            _network(job).cut(container.host, is_cut=True)
            _rest(job, self._draws.uniform(1.0, 15.0))
            if not job.is_over:
                _network(job).cut(container.host, is_cut=False)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@_in_namespaces
def test_hosts_hit_fifty_times_at_drawn_moments_give_the_bits_of_one_rank(
    dataset: Path, finished: Callable[..., Run], tmp_path: Path
) -> None:
    """HITS and SEED in the environment draw others."""
    whole = finished(*(f"--override={name}={value}" for name, value in _SMALL.items()))
    most, draws = int(os.environ.get("HITS", "50")), random.Random(os.environ.get("SEED", "37"))
    hits: list[str] = []
    for number in itertools.count(1):
        run = _Trained(tmp_path, dataset, f"run-{number}")
        torment = _Torment(run, draws)
        torment.until_finished(min(12, most - len(hits)))
        hits += torment.hits
        print(f"run {number}: {len(hits)} of {most} hits, last {torment.hits}", flush=True)
        assert run.head.weights_sha256 == whole.head.weights_sha256
        if len(hits) >= most:
            break
    assert most < 20 or set(hits) == {"host", "rank", "notice", "partition"}
