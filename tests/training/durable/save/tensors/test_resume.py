"""Nothing is lost but time: interrupted runs equal the uninterrupted one bit for bit."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.samples import MODULUS, lineage_problems, sum_of_all
from tests.training.hooks import interrupt_at
from tests.training.runs import Run, assert_equal, wait_for

# 30 training rows in batches of 8: the last batch of an epoch has 6.
STEPS_PER_STAGE = 3 * 4


def test_every_sample_comes_once_per_epoch(whole: Run) -> None:
    epochs: dict[tuple[str, int], list[str]] = {}
    sums: Counter[tuple[str, int]] = Counter()
    for line in whole.lineage().values():
        epochs.setdefault((line["stage"], line["epoch"]), []).append(line["ids_crc"])
        sums[line["stage"], line["epoch"]] += int(line["ids_sum"], 16)
    assert set(epochs) == {(stage, e) for stage in ("first", "second") for e in range(3)}
    assert all(total % MODULUS == sum_of_all(30) for total in sums.values())
    assert lineage_problems(whole.lineage()) == []
    assert epochs["first", 0] != epochs["first", 1]


@pytest.mark.parametrize(
    ("place", "sent"),
    [
        (("first", 0), signal.SIGUSR1),
        (("first", 7), signal.SIGTERM),
        (("second", 0), signal.SIGTERM),
        (("second", 11), signal.SIGUSR1),
    ],
)
def test_resume_continues_bit_for_bit(
    run: Run, whole: Run, place: tuple[str, int], sent: signal.Signals
) -> None:
    interrupt_at(*place, sent)
    assert run.attempt() == 75
    assert run.head.state == "released"
    done = run.lines("step")[-1]["step"]
    assert run.head.checkpoints[-1].step == done
    assert run.attempt() == 0
    assert_equal(run, whole)
    assert len(run.lines("step")) == 2 * STEPS_PER_STAGE, "no step was repeated"


def test_resume_after_many_interruptions_in_s3(
    bucket_uri: str, new_run: Callable[[str], Run], whole: Run
) -> None:
    run = new_run(f"{bucket_uri}/runs/run-1")
    places = [("shard", 1), ("first", 2), ("first-evaluation", 5), ("second", 5)]
    for place in places:
        interrupt_at(*place)
        assert run.attempt() == 75, place
    assert run.attempt() == 0
    assert_equal(run, whole)
    assert run.json("receipt.json")["generations"] == len(places) + 1
    assert len(run.lines("prepare")) == 3, "shards of an interrupted attempt are reused"


def test_a_notice_in_an_evaluation_discards_and_repeats_it(run: Run, whole: Run) -> None:
    run.options = ["--checkpoint-interval=1epochs"]
    interrupt_at("first-evaluation", 5)
    assert run.attempt() == 75
    assert run.lines("evaluation") == []
    assert run.head.checkpoints[-1].step == 4
    assert run.head.checkpoints[-1].kind == "periodic", "nothing changed since: only released"
    assert run.attempt() == 0
    assert [line["step"] for line in run.lines("evaluation")] == [4, 8, 12, 16, 20, 24]
    assert_equal(run, whole)


def test_a_rebalance_recommendation_saves_and_goes_on(run: Run, whole: Run) -> None:
    interrupt_at("first", 4, signal.SIGUSR2)
    assert run.attempt() == 0
    assert [e["kind"] for e in run.events("committed")].count("rebalance") == 1
    assert_equal(run, whole)


def test_resume_after_kills_at_random_times(run: Run, whole: Run) -> None:
    rng = random.Random(3)
    run.options = ["--override=step_seconds=0.01"]
    ways = [signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL]
    generation = 0
    for way in ways:
        process = run.fork()
        deadline = time.monotonic() + 120
        # Before that it may still be starting, and a signal would end it.
        while not run.store.get("head.json") or run.head.generation == generation:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        generation = run.head.generation
        time.sleep(rng.uniform(0.05, 0.25))
        assert process.pid is not None
        os.kill(process.pid, way)
        process.join(120)
        assert process.exitcode == (-9 if way == signal.SIGKILL else 75)
    assert run.attempt() == 0
    assert run.head.weights_sha256 == whole.head.weights_sha256
    assert run.losses() == whole.losses()


def test_a_process_takes_a_notice_from_outside(
    bucket_uri: str,
    new_run: Callable[[str], Run],
    whole: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = new_run(f"{bucket_uri}/runs/run-1")
    metrics = tmp_path / "metrics.jsonl"
    run.options = [
        "--override=step_seconds=0.02",
        "--checkpoint-interval=1000steps",
        f"--metrics-file={metrics}",
    ]
    process = run.fork()
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 9)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    process.join(120)
    assert process.exitcode == 75
    assert "[emergency]" in capfd.readouterr().out
    committed = run.events("committed")[-1]
    assert committed["kind"] == "emergency"
    assert 0 < committed["notice_to_commit_seconds"] < 10
    assert run.attempt() == 0
    assert run.head.weights_sha256 == whole.head.weights_sha256
    assert run.losses() == whole.losses()


def test_retention_keeps_what_the_stage_began_from(run: Run, whole: Run) -> None:
    interrupt_at("second", 10)
    assert run.attempt() == 75
    kinds = [entry.kind for entry in run.head.checkpoints]
    assert kinds == ["stage-end", "periodic", "periodic", "emergency"]
    stored = {key.split("/")[1] for key in run.store.sizes("checkpoints/")}
    named = {entry.name for entry in run.head.checkpoints}
    assert named <= stored
    assert run.attempt() == 0
    stored = {key.split("/")[1] for key in run.store.sizes("checkpoints/")}
    assert stored == {entry.name for entry in run.head.checkpoints}
    assert_equal(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_two_attempts_at_once_and_random_ends_change_no_bit(
    store_uri: str, new_run: Callable[[str], Run], whole: Run, seed: int
) -> None:
    """Candidates that take over too early, killed or stopped at any time: one lineage."""
    rng = random.Random(seed)
    run = new_run(store_uri)
    run.options = ["--override=step_seconds=0.01", "--lease-ttl-seconds=0.2"]
    for _ in range(5):
        processes = [run.fork(), run.fork()]
        time.sleep(rng.uniform(0.3, 1.2))
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, rng.choice([signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM]))
        for process in processes:
            process.join(120)
            assert process.exitcode in (0, 75, 76, -9)
    assert run.attempt() == 0
    assert run.head.weights_sha256 == whole.head.weights_sha256
    assert run.losses() == whole.losses()
