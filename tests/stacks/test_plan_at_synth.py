"""The plan at synth: reported, written, and in the way of what cannot work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from aws_cdk import App, Environment, Stack
from aws_cdk.assertions import Annotations, Match

from stacks.guard.construct import _forecast
from stacks.parameters import StackParameters
from stacks.plan_at_synth import (
    _accepted,
    annotate,
    epoch_seconds,
    least_busy_percent,
    prediction,
)

RATE = {"root_volume.initialization_mib_per_second": "300"}
INTERVAL = {"train.checkpoint_interval": "600s"}
SMALL = {"data_volume.gib": 100}


@pytest.fixture
def stack() -> Stack:
    return Stack(App(), "TrainingStack")


def test_the_plan_is_an_info(stack: Stack) -> None:
    plan = annotate(stack, StackParameters.for_size("g5.2xlarge"))
    assert plan is not None
    assert plan["size"] == "g5.2xlarge"
    info = Annotations.from_stack(stack)
    info.has_info("*", Match.string_like_regexp(r"plan: trajectory/full on g5\.2xlarge takes"))
    info.has_info("*", Match.string_like_regexp("waits 30 min for trajectory/manifest.json in the"))
    assert info.find_warning("*", Match.any_value()) == []


def test_of_a_program_the_unknown_and_the_known_are_reported(stack: Stack, tmp_path: Path) -> None:
    program = {"program": "bash run.sh", "source": str(tmp_path)}
    assert annotate(stack, StackParameters.for_size("g5.xlarge", **program)) is None
    info = Annotations.from_stack(stack)
    info.has_info("*", Match.string_like_regexp("no plan: how long 'bash run.sh' takes, how much"))
    info.has_info("*", Match.string_like_regexp(r"stops the run at 72 billed hours or \$73"))
    info.has_info("*", Match.string_like_regexp("no certificate: what an interruption costs it"))
    # Nobody can promise a time for it.
    late = StackParameters.for_size("g5.xlarge", **program, deadline_hours="6")
    with pytest.raises(ValueError, match="how long a program takes is not known; use 0, or"):
        annotate(stack, late)


def test_what_the_loading_of_a_root_volume_costs_is_reported(stack: Stack) -> None:
    annotate(stack, StackParameters.for_size("g5.xlarge", **RATE))
    each = r"each machine that boots, replacements too, costs \$0\.162 more: .* at 300 MiB/s"
    Annotations.from_stack(stack).has_info("*", Match.string_like_regexp(each))


MIXED = {"mix_gpu_counts": "true", "overrides": "micro_batch=4"}


def test_hours_and_dollars_of_each_mixed_size_are_reported(stack: Stack) -> None:
    annotate(stack, StackParameters.for_size("g5.xlarge", **MIXED))
    for size in ("g5.xlarge", "g5.12xlarge"):
        text = f"plan: trajectory/full on {size} takes .* on Spot, .* on demand"
        Annotations.from_stack(stack).has_info("*", Match.string_like_regexp(text))


def test_fails_for_a_mixed_size_whose_gpus_would_idle(stack: Stack) -> None:
    with pytest.raises(ValueError, match=r"3 of 4 GPUs of g5.12xlarge would have no micro-batch"):
        annotate(stack, StackParameters.for_size("g5.xlarge", mix_gpu_counts=True))


def test_fails_for_a_mixed_size_on_which_the_run_does_not_fit_by_its_name(stack: Stack) -> None:
    hours = StackParameters.for_size("g5.12xlarge", **MIXED).plans[0].hours_on_demand
    slow = StackParameters.for_size("g5.12xlarge", **MIXED, max_hours=f"{2 * hours:.2f}")
    with pytest.raises(ValueError, match=r"on g5.4xlarge, by mix_gpu_counts, max_hours is"):
        annotate(stack, slow)


def test_no_alternates_are_no_news(stack: Stack) -> None:
    annotate(stack, StackParameters.for_size("g5.48xlarge"))
    infos = Annotations.from_stack(stack).find_info(
        "*", Match.string_like_regexp("the fleet may start")
    )
    assert infos == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"max_hours": "9", "max_usd": "12.5"},
            r"the Guard stops the run at 9 billed hours or \$12\.5 or 24 hours without a "
            "machine; there is no deadline, so it waits for Spot",
        ),
        (
            {"max_hours": "9", "max_usd": "0", "max_wait_hours": "0", "deadline_hours": "6"},
            "at 9 billed hours; it buys on-demand capacity to end within 6 hours",
        ),
        ({"workload": "clips"}, r"at 72 billed hours or \$73 or 24 hours"),
    ],
    ids=["without a deadline", "with a deadline", "without a plan"],
)
@pytest.mark.usefixtures("unmeasured")
def test_the_limits_are_reported(given: dict[str, str], sentence: str, stack: Stack) -> None:
    annotate(stack, StackParameters.for_size("g5.xlarge", **given))
    Annotations.from_stack(stack).has_info("*", Match.string_like_regexp(sentence))


def test_what_is_tight_is_a_warning(stack: Stack) -> None:
    annotate(stack, StackParameters.for_size("g4dn.xlarge", overrides="width=128"))
    info = Annotations.from_stack(stack)
    info.has_warning("*", Match.string_like_regexp("no bfloat16 tensor cores"))
    info.has_warning(
        "*", Match.string_like_regexp("the plan ignores width, whose effect was not measured")
    )


def test_an_own_image_makes_the_refusal_of_its_sizes_a_warning(stack: Stack) -> None:
    own = {"pytorch_ami_parameter": "ami-0123456789abcdef0"}
    annotate(stack, StackParameters.for_size("g7e.2xlarge", **own))
    says = "whether ami-0123456789abcdef0 supports g7e.2xlarge is not known"
    Annotations.from_stack(stack).has_warning("*", Match.string_like_regexp(says))


@pytest.mark.usefixtures("unmeasured")
def test_an_unmeasured_workload_says_how_to_measure_it(stack: Stack) -> None:
    assert annotate(stack, StackParameters.for_size("g5.xlarge", workload="clips")) is None
    Annotations.from_stack(stack).has_info(
        "*", Match.string_like_regexp(r"python -m training measure --workload clips")
    )


def test_the_stacks_own_settings_are_planned_with() -> None:
    parameters = StackParameters.for_size(
        "g5.xlarge", overrides="micro_batch=8", zones="us-east-1a", **INTERVAL, **RATE,
        on_demand_base=1, notice_budget_seconds=60,
    )  # fmt: skip
    request = parameters.plans[0].request
    assert (request.on_demand, request.notice_seconds) == (True, 60)
    assert request.root_initialization_mib_per_second == 300
    # Nothing interrupts it.
    assert _accepted(parameters) == ("spot", "notice")
    assert _accepted(replace(parameters, on_demand_base=0)) == ()
    assert (request.micro_batch, request.checkpoint_interval) == (8, "600s")
    assert request.pools == len(parameters.sizes)
    assert request.volume_mib_per_second == parameters.data_volume.mib_per_second


@pytest.mark.parametrize("region", ["sa-east-1", "il-central-1", "eu-south-1"])
def test_a_region_without_known_prices_is_planned_at_the_dearest_and_says_so(region: str) -> None:
    elsewhere = Stack(App(), "TrainingStack", env=Environment(region=region))
    parameters = StackParameters.for_size("g5.xlarge", region=region, max_hours="100")
    plan = annotate(elsewhere, parameters)
    assert plan is not None
    # us-east-1's $1.006, and 1.54 times as much in Hong Kong, the dearest region of the snapshot.
    assert (plan["region"], plan["usd_per_hour"]) == (region, pytest.approx(1.006 * 1.54, abs=1e-3))
    assert parameters.max_usd == 155
    Annotations.from_stack(elsewhere).has_warning(
        "*", Match.string_like_regexp(f"no price of g5.xlarge in {region} is known")
    )


def test_the_limit_and_the_alternates_have_the_prices_of_the_region() -> None:
    """g5.4xlarge in eu-west-1: $1.813, where us-east-1's $1.624 was shown."""
    parameters = StackParameters.for_size("g5.4xlarge", region="eu-west-1", max_hours="100")
    assert parameters.max_usd == 182
    stack = Stack(App(), "TrainingStack", env=Environment(region="eu-west-1"))
    annotate(stack, parameters)
    Annotations.from_stack(stack).has_info(
        "*", Match.string_like_regexp(r"the dearest, g5.8xlarge, costs \$2\.7\d+ .*in eu-west-1")
    )


# A dataset of which only the plan's own data model knows that it is larger than the volume.
LARGE = {"data_volume.gib": 2}


def test_fails_on_what_cannot_work_with_the_change_that_would_pass(stack: Stack) -> None:
    with pytest.raises(ValueError, match=r"data_volume\.gib=\d+ would hold it.*-c accept=volume"):
        annotate(stack, StackParameters.for_size("g5.xlarge", **LARGE))
    annotate(stack, StackParameters.for_size("g5.xlarge", accept="volume", **LARGE))
    Annotations.from_stack(stack).has_warning("*", Match.string_like_regexp("accepted: the data"))


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        (
            {"deadline_hours": "0.05"},
            r"deadline_hours is 0\.05, but on demand alone the run takes 0\.\d+ hours; use "
            r"deadline_hours=0\.\d+ or more, or a faster size \(.*-c accept=deadline\)",
        ),
        (
            {"max_usd": "0.01"},
            r"max_usd is 0\.01, but half of all runs cost \$0\.\d+ or more.*budget",
        ),
        (
            {"max_hours": "0.01"},
            r"max_hours is 0\.01, but the run takes .* without an interruption",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_fails_for_limits_that_the_planned_run_cannot_keep(
    limit: dict[str, str], sentence: str, stack: Stack
) -> None:
    with pytest.raises(ValueError, match=sentence):
        annotate(stack, StackParameters.for_size("g5.xlarge", **limit))
    annotate(stack, StackParameters.for_size("g5.xlarge", accept="deadline,budget", **limit))
    # On demand is not part of a run that another override makes shorter.
    annotate(stack, StackParameters.for_size("g5.xlarge", overrides="epochs=1", **limit))


def test_the_guard_decides_by_the_plan_with_a_margin() -> None:
    head = {"stage": "head", "seconds": 100.0, "step_seconds": 1.0, "step_seconds_p90": 2.0}
    plan = {
        "stages": [head, {**head, "stage": "fast", "step_seconds_p90": 0.5}],
        "restart_seconds": 100.0,
        "checkpoint_seconds": 3.0,
        "checkpoint_interval_seconds": 60.0,
    }
    assert _forecast(plan) == {
        "stages": {"head": 100.0, "fast": 100.0},
        "slow_stages": {"head": 200.0, "fast": 100.0},
        "restart_seconds": 150.0,
        "save_seconds": 3.0,
        "interval_seconds": 60.0,
    }


def test_the_run_takes_its_prediction_along(stack: Stack) -> None:
    plan = annotate(stack, StackParameters.for_size("g5.xlarge"))
    words = dict(word.split("=") for word in prediction(plan).split())
    assert words["size"] == "g5.xlarge"
    assert float(words["hours_p50"]) > 0
    # From which the trainer says its dollars so far.
    assert float(words["usd_spot_per_hour"]) > 0
    assert prediction(None) == ""


def test_an_epoch_is_that_of_the_main_stage_where_it_trains_for_epochs(stack: Stack) -> None:
    plan = annotate(stack, StackParameters.for_size("g5.xlarge"))
    assert plan is not None
    assert epoch_seconds(plan) == plan["epoch_seconds"]
    assert epoch_seconds(None) is None
    assert least_busy_percent(plan) == plan["gpu_busy_percent"][0]
    assert least_busy_percent(None) is None


def test_growth_fits_a_g5_2xlarge_and_its_start_not_the_memory_of_a_g5_xlarge(
    stack: Stack,
) -> None:
    parameters = StackParameters.for_size("g5.2xlarge", workload="growth")
    assert (parameters.dataset, parameters.recipe) == ("growth", "full")
    plan = annotate(stack, parameters)
    assert plan is not None
    assert plan["gpu_memory_mib"] < 22_888
    # Each stage ends within an epoch, and commits: none is as long as the run.
    assert plan["epoch_seconds"] > 3600
    assert 60 < epoch_seconds(plan) < 3600 * plan["hours_on_demand"]  # type: ignore[operator]
    Annotations.from_stack(stack).has_info(
        "*", Match.string_like_regexp(r"plan: growth/full on g5\.2xlarge takes")
    )
    with pytest.raises(ValueError, match=r"while a stage starts: .* is g5\.2xlarge .*accept=host"):
        annotate(Stack(App(), "Small"), StackParameters.for_size("g5.xlarge", workload="growth"))


def test_imagenet_fits_the_default_volume_and_a_small_one_is_refused(stack: Stack) -> None:
    parameters = StackParameters.for_size("g5.2xlarge", workload="imagenet")
    assert (parameters.dataset, parameters.recipe) == ("imagenet", "full")
    plan = annotate(stack, parameters)
    assert plan is not None
    assert plan["bound_by"] == "GPU memory bandwidth"
    small = StackParameters.for_size("g5.2xlarge", workload="imagenet", **SMALL)
    with pytest.raises(ValueError, match=r"GiB .*volume.*accept=volume"):
        annotate(Stack(App(), "Small"), small)


def test_a_datasets_own_manifest_changes_the_plan(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    meta = {"splits": {"train": 128_117}, "image_bytes": 16_500, "image_pixels": 87_000}
    files = [{"name": "train-00000.tar", "bytes": 2_200_000_000}]
    manifest.write_text(json.dumps({"files": files, "meta": meta}))
    given = {"workload": "imagenet", **SMALL}
    own = StackParameters.for_size("g5.2xlarge", **given, dataset_manifest=str(manifest))
    plan = annotate(Stack(App(), "Own"), own)
    assert plan is not None
    assert plan["hours_on_demand"] < 5


def test_the_detector_is_deployed_with_the_seed_s_recipe_and_the_memory_of_its_largest_batch(
    stack: Stack,
) -> None:
    parameters = StackParameters.for_size("g5.2xlarge", workload="detection")
    assert (parameters.dataset, parameters.recipe) == ("detection", "full")
    plan = annotate(stack, parameters)
    assert plan is not None and plan["fits"] and plan["notice_fits"]
    (stage,) = plan["stages"]
    assert stage["usual_gpu_memory_mib"] < plan["gpu_memory_mib"] < 22_888
