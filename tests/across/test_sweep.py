"""A sweep of twelve in SweepStack's queue, a third of its runs taken: the proof, and a stop.

python -m pytest -m slow -s tests/across/test_sweep.py prints what benchmarks/LOG.md has.
"""

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aws_cdk import App, BootstraplessSynthesizer

from contract.sweep import Sweep, drawn_runs
from embedded_aws import EmbeddedAws
from operate.command import main
from operate.sweeps import OperatedSweep, find_operated_sweep
from stacks.guard.settings import quick_client
from stacks.parameters import StackParameters
from stacks.sagemaker.__main__ import sagemaker_command as sagemaker
from stacks.sweep_stack import SweepStack
from tests.training.forked import ForkedTrainer
from tests.training.runs import WORKLOAD
from training.cli import sweep as training_sweep
from training.cli.main import main as training
from training.durable.record.head import Head
from training.durable.store.folder import open_store

NUM_RUNS, NUM_TAKEN, LIMIT = 12, 4, 3
# Of ml.g5.xlarge, which stacks/sagemaker/prices.py knows; what of it a run may use at most.
MAX_USD, MAX_HOURS, ATTEMPTS = 10.6, 0.5, 2
NOTICE_SECONDS = 45.0
STEP_SECONDS = 0.3


def _sweep(dataset: Path, runs_uri: str, count: int, *more: str) -> list[str]:
    return [
        "sweep",
        *(f"--workload={WORKLOAD}", "--recipe=quick", f"--dataset-uri={dataset}"),
        *(f"--runs-uri={runs_uri}", "--vary=learning_rate=0.001..0.1", f"--random={count}"),
        *("--seed=37", f"--override=step_seconds={STEP_SECONDS}", *more),
    ]


@dataclass(frozen=True)
class Account:
    """The embedded account with SweepStack in it."""

    aws: EmbeddedAws
    outputs: dict[str, str]

    def queue(self, sweep: str, *more: str) -> list[str]:
        """The command that queues a sweep's runs."""
        return [
            "sweep",
            *("--runs-uri", f"s3://runs/sweeps/{sweep}", "--queue", self.outputs["SweepQueue"]),
            *("--role", self.outputs["SweepRole"], "--dataset-uri", "s3://datasets/tiny"),
            *("--image", "123456789012.dkr.ecr.us-east-1.amazonaws.com/training:1", "--spot"),
            *("--instance-type", "ml.g5.xlarge", "--max-hours", str(MAX_HOURS)),
            *("--attempts", str(ATTEMPTS), "--hyperparameter", "checkpoint-interval=3steps"),
            *("--hyperparameter", f"notice-budget-seconds={NOTICE_SECONDS:g}", *more),
        ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "tiny"
    assert training(["data", "make", f"--workload={WORKLOAD}", f"--out={out}", "--count=42"]) == 0
    return out


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs, drawn by the same command, on this machine and without interruption."""
    out = tmp_path_factory.mktemp("unbroken")
    names = SimpleNamespace(Popen=ForkedTrainer, STDOUT=subprocess.STDOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_sweep, "subprocess", names)
        more = ("--parallel=6", f"--logs={out / 'logs'}")
        assert training(_sweep(data, str(out / "runs"), NUM_RUNS, *more)) == 0
    return out / "runs"


@pytest.fixture(scope="module")
def account(data: Path) -> Iterator[Account]:
    app = App()
    stack = SweepStack(
        app,
        "SweepStack",
        parameters=StackParameters.for_size("g5.xlarge", **{"sweep.instances": str(LIMIT)}),
        dataset_bucket_name="datasets",
        run_bucket_name="runs",
        key_arn="",
        synthesizer=BootstraplessSynthesizer(),
    )
    template = app.synth().get_stack_by_name(stack.stack_name).template
    with EmbeddedAws() as aws, pytest.MonkeyPatch.context() as patch:
        for name, value in aws.environment().items():
            patch.setenv(name, value)
        quick_client.cache_clear()
        patch.setattr("boto3.DEFAULT_SESSION", None)  # it would keep an earlier account's key
        aws.service_jobs.notice_seconds = NOTICE_SECONDS
        aws.service_jobs.variables = {"OMP_NUM_THREADS": "1"}
        for bucket in ("datasets", "runs"):
            aws.client("s3").create_bucket(Bucket=bucket)
        for path in data.rglob("*"):
            if path.is_file():
                key = f"tiny/{path.relative_to(data)}"
                aws.client("s3").upload_file(str(path), "datasets", key)
        aws.client("cloudformation").create_stack(
            StackName="SweepStack",
            TemplateBody=json.dumps(template),
            Capabilities=["CAPABILITY_IAM"],
        )
        aws.client("cloudformation").get_waiter("stack_create_complete").wait(
            StackName="SweepStack", WaiterConfig={"Delay": 1}
        )
        (found,) = aws.client("cloudformation").describe_stacks(StackName="SweepStack")["Stacks"]
        outputs = {each["OutputKey"]: each["OutputValue"] for each in found["Outputs"]}
        yield Account(aws, outputs)
    quick_client.cache_clear()


@pytest.fixture
def runs(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*arguments: str) -> Any:
        capsys.readouterr()
        code = main([*arguments, "--json"])
        said = capsys.readouterr()
        assert code == 0, said.err
        return json.loads(said.out)

    return run


def _found(name: str) -> OperatedSweep:
    found = find_operated_sweep(name)
    assert found is not None
    return found


def _has_committed(run: str) -> bool:
    head = Head.read(open_store(f"s3://runs/sweeps/rates/{run}"))
    return head is not None and head.state == "running" and bool(head.checkpoints)


def _hash(uri: str) -> str:
    found = open_store(uri).get("receipt.json")
    assert found is not None, uri
    return str(json.loads(found.data)["weights_sha256"])


def test_a_sweep_in_a_folder_has_a_table_and_no_jobs(
    runs: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = drawn_runs(["learning_rate=0.01,0.02"], [], None, 0)
    written = Sweep(workload=WORKLOAD, recipe="quick", drawn="grid", runs=drawn)
    (tmp_path / "sweep.json").write_bytes(written.to_bytes())
    rows = runs("status", str(tmp_path))
    assert [(row["run"], row["state"], row["usd"]) for row in rows] == [
        ("learning_rate-0.01", "not started", 0.0),
        ("learning_rate-0.02", "not started", 0.0),
    ]
    assert main(["resume", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "now start its command again" in printed.err
    assert printed.out.endswith(" once started again\n"), "nothing was started"
    assert main(["stop", str(tmp_path)]) == 2
    assert f"no process on this machine trains {tmp_path}" in capsys.readouterr().err
    assert runs("open", str(tmp_path))["done"].endswith("0 of 2 runs have finished.")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_sweep_of_twelve_with_a_third_taken_equals_unbroken_runs(
    unbroken: Path,
    account: Account,
    data: Path,
    runs: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    began = time.monotonic()
    assert training(_sweep(data, "s3://runs/sweeps/rates", NUM_RUNS, "--write-only")) == 0
    capsys.readouterr()
    assert sagemaker(account.queue("rates", "--max-usd", str(MAX_USD))) == 0
    said = capsys.readouterr()
    assert "[ok] 7 of 12 runs are queued, 0 were already, 0 had ended" in said.out
    assert "5 runs are not queued: a run is queued only while" in said.err
    sweep = _found("rates")
    names = [one.run.name for one in sweep.swept.runs]
    # What is taken is drawn: three with SageMaker's notice, one without a word.
    taken = dict.fromkeys(sorted(random.Random(37).sample(range(NUM_RUNS), NUM_TAKEN)))
    lost, waiting, most = min(taken), set(taken), 0
    while True:
        sweep = _found("rates")
        assert sweep.queued is not None
        assert sweep.queued.reserved(sweep.states) <= MAX_USD
        rows = sweep.rows()
        most = max(most, sum(row["state"] == "running" for row in rows))
        for number in sorted(waiting):
            jobs = sweep.queued.jobs.get(names[number], [])
            if jobs and rows[number]["state"] == "running" and _has_committed(names[number]):
                act = account.aws.service_jobs
                (act.lose if number == lost else act.interrupt)(jobs[-1])
                waiting.discard(number)
        if all(row["state"] == "finished" for row in rows):
            break
        assert not any(row["state"] == "failed" for row in rows), rows
        is_known = len(sweep.queued.jobs) == NUM_RUNS
        if not is_known and sum(row["state"] == "finished" for row in rows) >= 3:
            runs("resume", "rates")
        time.sleep(0.5)
    assert not waiting, f"runs {waiting} ended before they were taken"
    equal = [
        _hash(f"s3://runs/sweeps/rates/{name}") == _hash(str(unbroken / name)) for name in names
    ]
    assert all(equal) and len({_hash(str(unbroken / name)) for name in names}) == NUM_RUNS
    jobs = account.aws.service_jobs.jobs
    first = {name: jobs[sweep.queued.jobs[name][0]].attempts[0].created for name in names}
    assert sorted(names, key=lambda name: first[name]) == names  # in the order asked for
    assert most <= LIMIT
    containers = {
        name: sum(each.num_starts for job in ids for each in jobs[job].attempts)
        for name, ids in sweep.queued.jobs.items()
    }
    assert [containers[name] for name in names] == [
        2 if number in taken else 1 for number in range(NUM_RUNS)
    ]
    spent = sum(row["usd"] for row in runs("status", "rates"))
    assert 0 < spent <= MAX_USD and spent == pytest.approx(
        sum(r["usd"] for r in runs("cost", "rates"))
    )
    denied = account.aws.access.evidence.report()["denied"]
    done = runs("open", "rates")["done"]
    assert f"12 of 12 runs have finished, for ${spent:.2f} so far." in done
    page = open_store("s3://runs/sweeps/rates").get("report.html")
    assert page is not None and page.data.decode().count("learning_rate-") >= NUM_RUNS
    with capsys.disabled():
        print(
            f"\n{sum(equal)} of {NUM_RUNS} hashes equal; {NUM_TAKEN} taken; {most} at once; "
            f"${spent:.2f} of ${MAX_USD}; {len(denied)} calls denied; "
            f"{time.monotonic() - began:.0f} s"
        )
    assert not denied


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_stop_saves_what_trains_and_a_resume_goes_on(
    account: Account, data: Path, runs: Callable[..., Any]
) -> None:
    assert training(_sweep(data, "s3://runs/sweeps/stops", 4, "--write-only")) == 0
    assert sagemaker(account.queue("stops")) == 0
    first = _found("stops").swept.runs[0]
    while (head := Head.read(first.store)) is None or not head.checkpoints:
        time.sleep(0.2)
    assert [row["state"] for row in runs("status", "stops")][-1] == "queued"  # the limit is three
    done = runs("stop", "stops", "--reason=lunch")["done"]
    assert done == "is stopped: 4 jobs have ended"
    rows = runs("status", "stops")
    assert rows[0]["state"] == "interrupted" and rows[-1]["state"] == "not started"
    head = Head.read(first.store)
    assert head is not None and head.state == "released" and head.checkpoints[-1].step > 0
    runs("resume", "stops")
    rows = runs("status", "stops")
    while {row["state"] for row in rows} != {"finished"}:
        assert not any(row["state"] == "failed" for row in rows)
        time.sleep(1.0)
        rows = runs("status", "stops")
    assert all(0 < row["usd"] < 1 and row["value"] is not None for row in rows)
