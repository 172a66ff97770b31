"""`python -m sizing select`: phases, the example of the help, and refusals in one sentence."""

import json
from typing import Any

import pytest

from sizing.__main__ import main
from sizing.catalogue.refresh import Refreshed, save

BERT = [
    "--phase", "serve-online", "--model", "bert-base",
    "--requests-per-minute", "1000", "--latency-ms", "200",
]  # fmt: skip


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(*arguments: str) -> Any:
        assert main(["select", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


def test_the_helps_example_costs_what_idle_instances_cost(ask: Any) -> None:
    answer = ask(*BERT)
    usd = {each["size"]: each["usd"] for each in answer["candidates"]}
    # One instance each, 60,000 requests an hour: dollars an hour over 0.06 million.
    assert usd["inf1.xlarge"] == pytest.approx(3.80)
    assert usd["g4dn.xlarge"] == pytest.approx(8.77, abs=0.005)
    assert usd["inf2.xlarge"] == pytest.approx(12.64, abs=0.005)
    assert usd["c5.2xlarge"] == pytest.approx(5.67, abs=0.005)
    # Two c5.xlarge bear the load, but not within 200 ms.
    three = next(each for each in answer["candidates"] if each["size"] == "c5.xlarge")
    assert three["figures"]["instances"] == 3
    assert all(each["figures"]["p95_ms"] <= 200 for each in answer["candidates"])
    assert "out of reach" in answer["left_out"]["c5.18xlarge"]


def test_an_experiment_is_never_put_where_torch_does_not_fit(ask: Any) -> None:
    answer = ask("--phase", "experiment")
    assert answer["candidates"][0]["size"] == "t3.medium"
    assert answer["left_out"]["t3.nano"] == "a Python process with torch takes 3 GiB"


def test_what_is_no_longer_supported_is_last_and_common_advice_is_contradicted(ask: Any) -> None:
    answer = ask(*BERT)
    assert answer["candidates"][0]["size"] == "c5.2xlarge"
    assert answer["candidates"][-1]["size"] == "inf1.xlarge"
    assert not answer["candidates"][-1]["is_supported"]
    said = " ".join(answer["differs"])
    assert "no longer supports Inf1" in said
    assert "at this demand they idle" in said


def test_with_a_hundred_times_the_demand_accelerators_win(ask: Any) -> None:
    many = [*BERT[:-3], "100000", *BERT[-2:]]
    best = ask(*many)["candidates"][0]
    assert best["size"] == "inf2.xlarge"
    assert best["figures"]["busy_percent"] > 60


def test_what_the_user_measured_counts(ask: Any) -> None:
    answer = ask(*BERT, "--throughput", "m5.large=40", "--latency", "m5.large=25")
    best = answer["candidates"][0]
    assert (best["size"], best["figures"]["throughput"]) == ("m5.large", "given")
    assert best["usd"] == pytest.approx(1.60)
    assert "give yours" not in " ".join(answer["differs"])


def test_batch_is_paid_by_the_hour_of_work_on_spot(ask: Any) -> None:
    answer = ask("--phase", "serve-batch", "--model", "bert-base")
    usd = {each["size"]: each["usd"] for each in answer["candidates"]}
    assert usd["inf2.xlarge"] < usd["g4dn.xlarge"] < usd["c5.xlarge"]


def test_experiments_go_to_burstable_sizes_until_their_credits_run_out(ask: Any) -> None:
    calm = ask("--phase", "experiment", "--cpu-percent", "15", "--memory-gib", "8")
    busy = ask("--phase", "experiment", "--cpu-percent", "95", "--memory-gib", "8")
    assert calm["candidates"][0]["size"] == "t3.large"
    assert busy["candidates"][0]["size"] == "m5.large"
    large = next(each for each in busy["candidates"] if each["size"] == "t3.large")
    assert "CPUCreditBalance" in " ".join(large["cautions"])
    prepared = ask("--phase", "prepare")
    assert not any(each["size"].startswith("t3") for each in prepared["candidates"])


def test_training_takes_what_fits_and_what_the_image_has_a_driver_for(ask: Any) -> None:
    answer = ask("--phase", "train", "--gpu-memory-mib", "30000")
    assert answer["candidates"][0]["size"] == "g6e.2xlarge"
    assert answer["left_out"]["g5.xlarge"] == "22,888 MiB is less than 30,000 MiB"
    assert "Neuron" in answer["left_out"]["trn1.2xlarge"]
    assert "does not name it" in answer["left_out"]["g7e.2xlarge"]
    assert "legacy" in answer["differs"][0]


def test_refreshed_prices_change_the_ranking(ask: Any) -> None:
    save(Refreshed(on_demand={"g4dn.xlarge": {"value": 0.1, "at": "2026-11-20T00:00"}}))
    assert ask(*BERT)["candidates"][0]["size"] == "g4dn.xlarge"


def test_the_table_says_why_and_what_to_mind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", *BERT]) == 0
    shown = capsys.readouterr().out
    assert "1. c5.2xlarge: 1 x $0.34/h for 16.67 requests/s" in shown
    assert "note: one instance is a single point of failure" in shown
    assert "inf1.xlarge is last: the Neuron SDK no longer supports Inf1." in shown
