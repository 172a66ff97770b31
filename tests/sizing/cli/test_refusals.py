"""What every command refuses: in one sentence, before anything is shown."""

from pathlib import Path

import pytest

from sizing.__main__ import main

BERT = [
    "--phase", "serve-online", "--model", "bert-base",
    "--requests-per-minute", "1000", "--latency-ms", "200",
]  # fmt: skip
MODEL = "tests.training.preflight.models_to_count:with_loss"
PLAN = ["plan", "trajectory", "--size", "g5.xlarge"]
PLANS_AND_MODELS: list[tuple[list[str], str]] = [
    (["plan", "trajectry", "--size", "g5.xlarge"], "did you mean trajectory?"),
    (["plan", "trajectory", "--size", "g5.xlrge"], "the nearest"),
    ([*PLAN, "--runs", "0"], "runs is 0"),
    ([*PLAN, "--gpus", "9"], "g5.xlarge has 1"),
    (
        ["plan", "imagenet", "--size", "g5.48xlarge", "--gpus", "8"],
        "a step of imagenet/full has micro-batches for 4 of 8 GPUs (gpus=8, hosts=1); use 4, a "
        "micro_batch of at most 128, or a larger batch",
    ),
    (
        ["plan", "detection", "--size", "g5.2xlarge", "--hosts", "4"],
        "for 1 of 4 GPUs (gpus=1, hosts=4); use 1 or a larger batch",
    ),
    (["advise", "growth", "--gpus", "2"], "has micro-batches for 1 of 2 GPUs"),
    (["advise", "trajectory", "--sizes", ","], "names no size"),
    (["advise", "trajectory", "--market", "fallback"], "add --deadline-hours"),
    (
        ["advise", "imagenet", "--sizes=g5.xlarge", "--market=fallback", "--deadline-hours=1"],
        "no size keeps the limits with --market fallback",
    ),
    (["advise", "trajectory", "--given", "parallel_jobs=many"], "write SIGNAL=NUMBER"),
    (["advise", "trajectory", "--given", "parallel_jobs=-1"], "a number from 0"),
    (["advise", "trajectory", "--given", "parallel_jobs=2.5"], "a whole number from 1"),
    (["advise", "trajectory", "--max-usd", "nan"], "--max-usd is nan; use a number above 0"),
    (["advise", "trajectory", "--deadline-hours", "-3"], "--deadline-hours is -3; use"),
    ([*PLAN, "--samples", "99999999999999"], "use 1 to a trillion"),
    (["advise", "trajectory", "--hours-per-week", "200"], "at most 168"),
    (["advise", "trajectory", "--hours-per-week", "0"], "more than 0"),
    (["advise", "trajectory", "--given", "gpu_utilization_percent=500"], "from 0 to 100"),
    ([*PLAN, "--micro-batch", "0"], "micro_batch is 0"),
    (
        ["select", "--instead-of", "c5.xlarge", "--cpu-percent", "0"],
        "--cpu-percent must be above 0",
    ),
    (["model", "package.module:function", "--gpus", "0"], "gpus is 0"),
    (["model", "package.module:function", "--batch", "0"], "batch is 0"),
    (["model", "package.module:function", "--steps", "0"], "steps is 0"),
    # Before anything is counted.
    (["model", "package.module:function", "--size", "t3.nano"], "no NVIDIA GPU of its own"),
    (["model", "package.module:function", "--micro-batch", "0"], "micro_batch is 0"),
    (
        [*PLAN, "--batch", "96"],
        "not a multiple of the micro-batch",
    ),
    ([*PLAN, "--epochs", "0"], "epochs is 0"),
    (["select", "--instead-of", "g5.xlarge"], "add --gpu-percent"),
    (["select", "--instead-of", "inf1.xlarge", "--gpu-percent", "5"], "no NVIDIA GPU"),
    (["select", "--instead-of", "c5.xlarge", "--cpu-percent", "120"], "at most 100"),
    (["plan"], "use either a workload or --run"),
    (["plan", "trajectory", "--run", "out"], "use either a workload or --run"),
    (["plan", "trajectory"], "add --size"),
    (["plan", "trajectory", "--calibrate"], "--calibrate needs --run"),
    (["plan", "--run", "nowhere"], "nowhere does not exist"),
]
SELECT: list[tuple[list[str], str]] = [
    (["--phase", "serve-online", "--model", "bert-base"], "needs --requests-per-minute and"),
    (["--phase", "serve-batch"], "serve-batch needs --model (bert-base) or --throughput"),
    (
        ["--phase", "serve-batch", "--model", "bert-base", "--latency-ms", "9"],
        "--latency-ms is for serve-online, not for serve-batch: leave it out",
    ),
    (
        ["--phase", "train", "--model", "bert-base"],
        "--model is for serve-online or serve-batch, not for train: leave it out",
    ),
    (["--phase", "serve-batch", "--model", "bert-bse"], "did you mean bert-base?"),
    ([*BERT, "--throughput", "c5.xlarg=5"], "the nearest are c5.xlarge"),
    ([*BERT, "--throughput", "c5.xlarge"], "takes SIZE=NUMBER, such as c5.xlarge=55"),
    ([*BERT, "--throughput", "c5.xlarge=-1"], "takes SIZE=NUMBER"),
    ([*BERT, "--latency", "m5.large=5"], "needs --throughput m5.large=N"),
    ([*BERT[:-1], "-5"], "--latency-ms must be above 0 and below 1e9, got -5"),
    ([*BERT[:-1], "nan"], "--latency-ms must be above 0 and below 1e9, got nan"),
    ([*BERT[:-1], "0"], "--latency-ms must be above 0 and below 1e9, got 0"),
    (["--phase", "train", "--vcpus", "0"], "--vcpus must be above 0"),
    ([*BERT[:-1], "0.5"], "no size meets the requirements: "),
    (["--phase", "train", "--gpu-memory-mib", "9999999"], "no size meets the requirements: "),
    (
        ["--phase", "train", "--gpu-percent", "10"],
        "--gpu-percent is for instead-of, not",
    ),
    (["--instead-of", "g5.xlarge", "--vcpus", "4"], "not for instead-of: leave it out"),
    (["--phase", "experiment", "--cpu-percent", "120"], "--cpu-percent is at most 100"),
]
CATALOGUE: list[tuple[list[str], str]] = [
    (["g5.3xlarge"], "size 'g5.3xlarge' is not in the instance catalogue; the nearest are"),
    (["--family", "g55"], "no family 'g55' in the catalogue; did you mean g5"),
    (["--gpu", "A10X"], "no accelerator 'A10X' in the catalogue; "),
    (["--families", "--family", "g5"], "--families lists all of them; leave out family"),
    (["--family", "t3", "--fit", "train"], "no size matches all of these options"),
]
PRICES: list[tuple[list[str], str]] = [
    (["--region", "eu-wst-1"], "no prices of region 'eu-wst-1' (did you mean eu-west-1?)"),
    (["--zone", "us-east-1a"], "zone 'us-east-1a' is not a zone id of us-east-1; known are"),
    (["--usd-per-hour", "cheap"], "--usd-per-hour 'cheap' cannot be read; write dollars"),
    (["--usd-per-hour", "g5.xl=1"], "'g5.xl' is not in the instance catalogue"),
]
BEFORE_COUNTING: list[tuple[list[str], str]] = [
    (["model", MODEL, "--steps", "10", "--epochs", "1"], "--steps contradicts --samples"),
    (["model", MODEL, "--epochs", "3"], "--epochs needs --samples"),
    (["model", MODEL, "--footprints", "kept.json"], "this command counts again"),
]
EVERY = [
    *PLANS_AND_MODELS,
    *BEFORE_COUNTING,
    *((["select", *arguments], says) for arguments, says in SELECT),
    *((["catalogue", *arguments], says) for arguments, says in CATALOGUE),
    *(([*PLAN, *options], says) for options, says in PRICES),
]


@pytest.mark.parametrize(("arguments", "says"), EVERY)
def test_fails_in_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown, said = capsys.readouterr()
    assert shown == ""
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["[]", '{"format": 2}', '{"format": 2, "footprints": [{"workload": "a"}]}']
)
def test_fails_for_footprints_of_another_shape(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.json").write_text(content)
    assert main([*PLAN, "--footprints", str(tmp_path / "rows.json")]) == 2
    assert "rows.json has no list of footprints; create it again" in capsys.readouterr().err


def test_an_instance_store_is_no_larger_than_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data-on", "nvme", "--volume-gib", "900", "--dataset-gib", "500"]
    main(["plan", "trajectory", "--size", "g6.xlarge", *options])
    assert "the instance store has 232" in " ".join(capsys.readouterr().out.split())


def test_a_history_that_cannot_be_read_is_said_and_the_plan_is_as_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(PLAN) == 0
    without = capsys.readouterr()
    (tmp_path / "bad.json").write_text("{")
    for name, why in (("bad.json", "is not a history of Spot pools"), ("none.json", "there is no")):
        assert main([*PLAN, "--history", str(tmp_path / name)]) == 0
        said = capsys.readouterr()
        assert said.out == without.out
        assert said.err.startswith("planned without a Spot history: ")
        assert why in said.err
        assert len(said.err.splitlines()) == 1
