"""One run on several hosts, as one SageMaker training job: submit, interrupt, resume, prove.

`make demo HOSTS=2`. The job has SweepStack's role, so the run is below sweeps/.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.keys import HEAD, METRICS, RECEIPT
from contract.lineage import Line
from contract.metrics import LineReader
from embedded_aws import TrainingJob
from rehearsal.demo.actions import Action, Seen, is_safe
from rehearsal.demo.demo import Demo
from rehearsal.demo.deployment import DATASET, SWEEPS
from rehearsal.demo.fleet import RehearsalFailed
from rehearsal.demo.grants import keep, usage
from rehearsal.demo.receipt import Curves, loss_curves, results, where
from rehearsal.demo.run_files import (
    BucketFiles,
    FolderFiles,
    bucket_files,
    read_json,
    read_metrics,
    read_steps,
)

_IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/training:1"


@dataclass(kw_only=True, slots=True)
class HostsDemo(Demo):
    """The demo with a SageMaker job on several hosts instead of the fleet."""

    interruptions: list[dict[str, Any]] = field(default_factory=list)
    _acted: float = 0.0
    _latest: Line = field(default_factory=dict)  # the run's latest metrics line of work
    _struck: int = 0  # the generation of the attempt that was interrupted last
    _relayed: dict[tuple[str, str], int] = field(default_factory=dict)  # characters, by log
    _first: dict[int, float] = field(default_factory=dict)  # by start: the time of its first step

    def rehearse(self) -> tuple[dict[str, Any], Curves]:
        """Run all phases; return the receipt and the loss curves, or raise RehearsalFailed."""
        stacks, folder = self.stacks, self.stacks.folder / "uninterrupted"
        stacks.aws.service_jobs.folder = stacks.folder
        reference = self._deploy(folder)
        resources = stacks.check_resources()
        stacks.aws.service_jobs.notice_seconds = self.notice_seconds
        stacks.aws.service_jobs.variables = {"PYTHONPATH": str(self.options.source or "")}
        run = bucket_files(stacks.aws.client("s3"), f"{stacks.output(SWEEPS, 'SweepsUri')}demo")
        self._begin()
        job = self._submit(run)
        reader = LineReader(lambda: run.sizes(METRICS), lambda names: map(run.read, names))

        def is_over() -> bool:
            for line in reader.new():
                if line["kind"] in ("step", "prepare"):
                    self._latest = line
                    if self._is_new:
                        self._first.setdefault(job.num_starts, time.time())
            self._look(job, run)
            return job.is_over

        self._wait(lambda: f"the job {job.name}", is_over)
        if job.status != "Completed":
            raise RehearsalFailed(f"the job is {job.status}: {job.reason}")
        self._finish(reference)
        whole = FolderFiles(folder=folder)
        receipt = self._receipt(job, run, whole, resources)
        return receipt, loss_curves(run, whole, receipt)

    def _begin(self) -> None:
        number = len(self.interruptions)
        until = f"until {self.plan[number]}" if number < len(self.plan) else "to the end"
        self.log.begin(f"{self.options.hosts} hosts of one training job, {until}")

    def _submit(self, run: BucketFiles) -> TrainingJob:
        """Create the job by our own command."""
        stacks, trained, options = self.stacks, self.trained, self.options
        bucket = stacks.output(DATASET, "DatasetBucketName")
        pairs = [
            f"checkpoint-interval={self.context['train.checkpoint_interval']}",
            f"lease-ttl-seconds={self.context['train.lease_ttl_seconds']}",
            f"notice-budget-seconds={self.context['notice_budget_seconds']}",
            *options.overrides.split(),
        ]
        stacks.start_python(
            "submit",
            *("-m", "stacks.sagemaker", "submit", "--instances", str(options.hosts), "--spot"),
            *("--workload", options.workload, "--recipe", self.context["recipe"]),
            *("--instance-type", f"ml.{options.size}", "--max-hours", "1", "--image", _IMAGE),
            *("--role", stacks.output(SWEEPS, "SweepRole")),
            *("--run-uri", f"s3://{run.bucket}/{run.prefix}"),
            *("--dataset-uri", f"s3://{bucket}/{trained.dataset}"),
            *(word for pair in pairs for word in ("--hyperparameter", pair)),
        ).expect()
        self._acted = time.monotonic()
        return list(stacks.aws.service_jobs.trainings.values())[-1]

    def _look(self, job: TrainingJob, run: BucketFiles) -> None:
        """Relay the logs, do what is due, watch for the commit after a notice."""
        for host in job.network.hosts if job.network else ():
            text, of = job.log(host), (job.name, host)
            start, self._relayed[of] = self._relayed.get(of, 0), text.rfind("\n") + 1
            for line in text[start : self._relayed[of]].splitlines():
                self.log.hear(f"{host}: {line}")
        last = self.interruptions[-1] if self.interruptions else {}
        if last.get("notice") and last["notice_to_commit_seconds"] is None and job.ending:
            head = read_json(run, HEAD)
            if head is not None and is_safe(head, {}):
                last["notice_to_commit_seconds"] = round(time.monotonic() - self._acted, 3)
        number = len(self.interruptions)
        may_act = number < len(self.plan) and job.containers and not job.ending and self._is_new
        if may_act and self.plan[number].is_due(Seen(line=self._latest)):
            self._interrupt(job, self.plan[number])

    @property
    def _is_new(self) -> bool:
        """Whether the latest progress is from after the last interruption."""
        return bool(self._latest) and self._latest["generation"] > self._struck

    def _interrupt(self, job: TrainingJob, action: Action) -> None:
        """Take away the last host, which does not hold the run's lease."""
        host, jobs = job.containers[-1].host, self.stacks.aws.service_jobs
        latest = self._latest
        self._struck = latest["generation"]
        has_notice = action.do == "notice"
        (jobs.interrupt if has_notice else jobs.lose)(job.name, host)
        self._acted = time.monotonic()
        kind = "notice" if has_notice else "kill without notice"
        what = f"{kind} to {host} {where(latest['stage'], latest)}"
        self.log(f"{what}; SageMaker ends all hosts within {self.notice_seconds:g} s")
        self.interruptions.append(
            {"what": what, "notice": has_notice, "notice_to_commit_seconds": None}
        )
        self._begin()

    def _receipt(
        self, job: TrainingJob, run: BucketFiles, whole: FolderFiles, resources: Mapping[str, int]
    ) -> dict[str, Any]:
        ours, theirs = read_json(run, RECEIPT) or {}, read_json(whole, RECEIPT) or {}
        lost = sum(line["kind"] == "step" for line in read_metrics(run)) - len(read_steps(run))
        starts, network = job.num_starts, job.network
        assert network is not None
        place = "in network namespaces" if network.is_isolated else "on one loopback, as processes"
        return {
            "resources": sum(resources.values()),
            "workload": ours["workload"],
            "recipe": ours["recipe"],
            "job": f"{len(network.hosts)} x ml.{self.options.size}, started "
            f"{'once' if starts == 1 else f'{starts} times'}; hosts "
            f"{', '.join(network.hosts)} {place}",
            "interruptions": len(self.interruptions),
            "notice_seconds": self.notice_seconds,
            **results(run, whole, ours, theirs, self.interruptions, lost),
            "instances_running": len(job.containers),
            "processes_left": self.stacks.processes_left(self.stacks.folder),
            **usage(keep(self.stacks.aws.access.evidence.report(), self.stacks.folder)),
            "machines": list(self._bars(job)),
            "seconds": round(time.monotonic() - self.started, 1),
        }

    def _bars(self, job: TrainingJob) -> Iterator[dict[str, Any]]:
        """Yield each host's time in each start, for the timeline."""
        starts = [each for each in job.transitions if each["Status"] == "Training"]
        for number, start in enumerate(starts, start=1):
            first = self._first.get(number)
            for host in job.network.hosts if job.network else ():
                yield {
                    "instance": f"{host}, start {number}",
                    "at": start["StartTime"] - job.created,
                    "seconds": start["EndTime"] - start["StartTime"],
                    "seconds_to_first_progress": first and first - start["StartTime"],
                    "ended": "finished" if number == len(starts) else "all restart",
                }
