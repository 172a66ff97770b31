"""The plan: what it predicts follows from its footprint, and what cannot work is refused."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sizing import catalogue
from sizing.catalogue.refresh import PriceBook
from sizing.models import footprints
from sizing.models.fitted import fitted
from sizing.plan.checks import Findings, check_plan
from sizing.plan.plan_inputs import Request
from sizing.plan.report import VERSIONS_KEPT_DAYS, figures, plan_json, plan_line, summary
from sizing.plan.size_plan import idle_at_notice, interval_seconds, make_plan
from sizing.plan.spot_verdict import saving_percent, spot_verdict
from tests.sizing import sample_footprints
from tests.sizing.sample_plan import plan

MIB = sample_footprints.MIB
CONTRACT = {
    "fits": bool,
    "gpu_memory_mib": int,
    "bound_by": str,
    "epoch_seconds": float,
    "hours_p50": float,
    "hours_p90": float,
    "usd_per_hour": float,
    "usd_spot_per_hour": float,
    "usd_on_demand": float,
    "usd_spot_p50": float,
    "usd_spot_p90": float,
    "checkpoint_bytes": int,
    "checkpoint_seconds": float,
    "notice_fits": bool,
    "warnings": list,
    "size": str,
    "workload": str,
    "recipe": str,
}


def found_in(
    tmp_path: Path, *, footprint: dict[str, object] | None = None, **changes: object
) -> Findings:
    return check_plan(plan(tmp_path, footprint=footprint, **changes))


@pytest.mark.slow
def test_a_thousand_plans_take_at_most_ten_cpu_seconds() -> None:
    sizes = [each.size for each in catalogue.sizes.trainable_by_price()]
    recipes = footprints.recipes()["imagenet"]
    asked = [
        Request(workload="imagenet", recipe=recipe, size=size, epochs=epochs)
        for epochs in range(1, 20)
        for recipe in recipes
        for size in sizes
    ][:1000]
    assert len(asked) == 1000
    began = time.process_time()
    for each in asked:
        make_plan(each)
    took = time.process_time() - began
    print(f"1,000 plans: {took:.1f} CPU s")
    assert took < 10


def test_the_json_has_every_field_and_every_figure_its_source(
    tmp_path: Path,
) -> None:
    made = plan(tmp_path)
    found = plan_json(made, check_plan(made))
    assert {name: type(found[name]) for name in CONTRACT} == CONTRACT
    assert found["figures"]
    assert all(figure["basis"] and figure["source"] for figure in found["figures"].values())


def test_an_assumed_price_is_not_called_published(tmp_path: Path) -> None:
    book = PriceBook(region="sa-east-1", assumes=True)
    found = plan(tmp_path, size="g5.2xlarge", prices=book)
    assert found.inputs.price.basis == "assumed"
    bases = [figures(found)[name]["basis"] for name in ("on_demand", "spot")]
    assert bases == ["modelled", "modelled"]


def test_a_budget_below_the_median_names_what_the_plan_does_not_count(tmp_path: Path) -> None:
    found = found_in(tmp_path, max_usd=0.01).problems["budget"]
    assert re.search(r"use more than max_usd=0\.\d+ \(volumes and addresses count, too\)", found)
    made = plan(tmp_path)
    assert made.spot is not None and made.spot.usd_p50 < made.usd_on_demand
    between = (made.spot.usd_p50 + made.usd_on_demand) / 2
    for on_demand in (False, True):
        limited = found_in(tmp_path, max_usd=between, on_demand=on_demand)
        assert ("budget" in limited.problems) == on_demand


def test_the_page_has_what_all_saves_of_a_run_cost_in_s3() -> None:
    root = Path(__file__).parents[3]
    context = json.loads((root / "cdk.json").read_text(encoding="utf-8"))["context"]
    assert context["versions_kept_days"] == VERSIONS_KEPT_DAYS
    rows = []
    for workload, recipe in (
        *(("detection", "coco_12"), ("imagenet", "full")),
        *(("trajectory", "magvit_b"), ("growth", "full")),
    ):
        made = make_plan(Request(workload=workload, recipe=recipe, size="g5.2xlarge"))
        row = dict(summary(made))["checkpoint"]
        each, all_saves, usd = re.findall(r"[\d,]+ MB|[\d,]+ GB|\$[\d.]+", row)
        assert made.spot is not None
        # A GB costs $0.023 a month of 730 hours.
        gb = made.inputs.checkpoint_bytes / 1e9 * made.work.seconds / made.spot.interval_seconds
        assert float(usd[1:]) == pytest.approx(gb * 0.023 * 14 * 24 / 730, abs=0.01)
        machines = f"${made.spot.usd_p50:.2f}"
        rows.append(f"| {workload}, {recipe} | {each} | {all_saves} | {usd} | {machines} |")
    page = (root / "docs" / "costs.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in page, "\n".join(rows)


def test_a_trainer_that_stops_at_a_notice_pays_for_all_of_it(tmp_path: Path) -> None:
    made = plan(tmp_path)
    stops = replace(made.request, trains_on_at_notice=False)
    assert idle_at_notice(stops, made.notice) == made.notice.budget
    assert idle_at_notice(made.request, made.notice) < made.notice.budget


def test_an_interval_is_of_steps_or_epochs_of_the_main_stage(tmp_path: Path) -> None:
    main = plan(tmp_path).work.main
    assert interval_seconds("100000steps", main) == pytest.approx(100_000 * main.step.seconds)
    assert interval_seconds("100epochs", main) == pytest.approx(100 * main.epoch_seconds)
    assert interval_seconds("90s", main) == 90


def test_memory_is_peak_and_fragments_and_context(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert found.work.memory.allocated == pytest.approx(560)
    assert found.work.memory.need == pytest.approx(560 * 1.1 + 700)


def test_convolutions_need_a_workspace_that_the_allocator_counts(tmp_path: Path) -> None:
    found = plan(tmp_path, footprint={"convolution_share": 1.0}).work.memory
    assert found.workspace == pytest.approx(fitted().workspace_mib)
    assert found.allocated == pytest.approx(560 + found.workspace)
    assert found.need == pytest.approx(found.allocated * 1.1 + 700)


def test_the_hours_have_the_range_of_their_steps(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert found.hours_low < found.hours_on_demand < found.hours_high
    shown = plan_json(found, check_plan(found))
    assert shown["hours_on_demand_p10"] == pytest.approx(found.hours_low, rel=1e-4)
    assert "for similar runs" in plan_line(found)


def test_the_forecast_holds_the_range_of_the_steps(tmp_path: Path) -> None:
    found = plan(tmp_path, footprint={"epochs": 2000})
    calm = plan(tmp_path, footprint={"epochs": 2000}, rate_per_hour=0.0)
    assert found.spot is not None
    assert calm.spot is not None
    assert calm.spot.machine_hours_p50 == pytest.approx(calm.hours_on_demand, rel=0.02)
    assert calm.spot.machine_hours_p90 == pytest.approx(calm.hours_high, rel=0.02)
    assert found.spot.machine_hours_p90 > found.hours_high
    assert found.spot.hours_p90 > found.hours_high


def test_the_saving_of_spot_compares_the_same_work(tmp_path: Path) -> None:
    # Runs that may take three times as long cost more, on Spot and on demand.
    tiny = {"kernels": 5000, "flops_per_sample": 1000, "activations_each": MIB}
    found = plan(tmp_path, footprint=tiny, size="p4d.24xlarge", rate_per_hour=0.0)
    shares = found.inputs.spot_price.usd_per_hour / found.inputs.price.usd_per_hour
    assert saving_percent(found) == pytest.approx(100 * (1 - shares), abs=0.5)


def test_a_limit_is_compared_with_billed_hours(tmp_path: Path) -> None:
    # The Guard counts machine hours: waiting for a machine is free.
    made = plan(tmp_path, footprint={"epochs": 2000})
    assert made.spot is not None
    billed, clock = made.spot.machine_hours_p90, made.spot.hours_p90
    assert clock > 1.2 * billed
    limits = {1.1 * billed: False, 0.9 * billed: True}
    for limit, says in limits.items():
        found = found_in(tmp_path, footprint={"epochs": 2000}, max_hours=limit)
        assert any("one run in ten is billed" in text for text in found.warnings) == says


def test_fails_on_a_spot_price_above_on_demand_for_that_reason(tmp_path: Path) -> None:
    dear = plan(tmp_path, prices=PriceBook(given={"": 5.0}))
    found = check_plan(dear)
    assert "an hour costs $5.000 on Spot and $1.212 on demand" in found.problems["spot"]
    # Not the p50 of all runs, which the plan shows: that of runs whose work is the p50.
    assert "on demand for the same work, because" in found.problems["spot"]
    assert not any("Spot saves nothing" in text for text in found.warnings)
    assert spot_verdict(dear).reasons[0].startswith("it costs ")
    # A quarter more is refused as well.
    assert "spot" in found_in(tmp_path, prices=PriceBook(given={"": 1.5})).problems


def test_a_deadline_within_the_range_of_the_work_is_a_warning(tmp_path: Path) -> None:
    made = plan(tmp_path)
    within = (made.hours_on_demand + made.hours_high) / 2
    found = {
        hours: found_in(tmp_path, deadline_hours=hours).warnings
        for hours in (within, 1.01 * made.hours_high)
    }
    says = [any("even on demand" in text for text in warnings) for warnings in found.values()]
    assert says == [True, False]


def test_launches_that_decide_make_the_range(tmp_path: Path) -> None:
    tiny = {"kernels": 5000, "flops_per_sample": 1000, "activations_each": MIB}
    main = plan(tmp_path, footprint=tiny).work.main
    assert main.bound_by == "kernel launches"
    launch = fitted().launches["NVIDIA A10G"]
    assert main.seconds_high / main.seconds == pytest.approx(launch.high / launch.likely, rel=0.1)


def test_a_loader_that_decides_has_its_own_range(tmp_path: Path) -> None:
    idle = {"flops_per_sample": 1, "kernels": 1, "activations_each": 1024, "parameter_bytes": 1024}
    slow = plan(tmp_path, size="g5.xlarge", footprint=idle)
    assert slow.work.main.bound_by == "loader CPU"
    # It was measured, on another CPU.
    epochs = [slow.work.seconds_low, slow.work.seconds, slow.work.seconds_high]
    assert epochs == pytest.approx([epochs[1] * share for share in (0.7, 1.0, 1.4)], rel=0.05)


@pytest.mark.parametrize(("size", "says"), [("g6.xlarge", True), ("p3.2xlarge", False)])
def test_a_gpu_without_published_runs_is_a_warning(tmp_path: Path, size: str, says: bool) -> None:
    found = found_in(tmp_path, size=size).warnings
    assert any("no published run on NVIDIA L4" in text for text in found) == says


def test_fails_on_memory_with_the_micro_batch_that_would_fit(tmp_path: Path) -> None:
    found = found_in(tmp_path, footprint={"activations_each": 1500 * MIB})
    assert not found.fits
    # 22,888 MiB - 700 of context, of which fragments take a tenth: 20,170, less 400 for the state.
    assert "micro_batch=8 would fit" in found.problems["memory"]


def test_fails_on_state_that_no_micro_batch_makes_smaller(tmp_path: Path) -> None:
    message = found_in(tmp_path, footprint={"parameter_bytes": 7_000 * MIB}).problems["memory"]
    assert "the cheapest size that fits it is g6e.xlarge" in message


@pytest.mark.parametrize(
    ("problem", "footprint"),
    [
        ("memory", {"parameter_bytes": 7_000 * MIB}),
        # To resume takes more than four fifths of 192 GiB, less than those of g5.16xlarge's 256.
        ("host", {"checkpoint_bytes": 180 * 2**30}),
    ],
)
def test_the_size_that_a_refused_plan_of_four_gpus_names_has_four_that_suffice(
    tmp_path: Path, problem: str, footprint: dict[str, object]
) -> None:
    def problems(size: str) -> Mapping[str, str]:
        return found_in(tmp_path, size=size, gpus=4, footprint=footprint).problems

    (size,) = re.findall(r"the cheapest size .+ is (\S+)$", problems("g5.12xlarge")[problem])
    assert catalogue.find(size).num_gpus >= 4
    assert problem not in problems(size)


def test_the_micro_batch_that_a_refused_plan_names_fits_gpus_that_share_the_model(
    tmp_path: Path,
) -> None:
    # Of the parameters' four copies, 28,000 MiB, each of four GPUs has a quarter.
    footprint = {"parameter_bytes": 7_000 * MIB, "activations_each": 1500 * MIB}

    def problems(micro_batch: int) -> Mapping[str, str]:
        asked = {"size": "g5.12xlarge", "gpus": 4, "micro_batch": micro_batch, "sharded": True}
        return found_in(tmp_path, footprint=footprint, **asked).problems

    (micro_batch,) = re.findall(r"; micro_batch=(\d+) would fit", problems(16)["memory"])
    assert "memory" not in problems(int(micro_batch))


def test_fails_on_a_dataset_over_the_size_s_instance_store(tmp_path: Path) -> None:
    # 450 GB and 250 GB.
    assert found_in(tmp_path, size="g5.2xlarge", data_on="nvme", dataset_gib=300).fits
    found = found_in(tmp_path, size="g5.xlarge", data_on="nvme", dataset_gib=300)
    assert (
        "the instance store has 232; data_on=ebs with data_volume.gib=330 would hold it"
        in (found.problems["volume"])
    )


def test_fails_on_four_runs_that_do_not_share_their_data(tmp_path: Path) -> None:
    assert "memory-map the data" in found_in(tmp_path, runs=4, unshared_gib=7.3).problems["host"]
    assert "host" not in found_in(tmp_path, runs=4).problems


def test_fails_where_spot_would_never_end(tmp_path: Path) -> None:
    found = plan(tmp_path, rate_per_hour=200.0)
    assert found.spot is None
    assert "never end" in check_plan(found).problems["spot"]


def test_a_checkpoint_over_the_notice_is_a_warning_while_periodic_saves_help(
    tmp_path: Path,
) -> None:
    found = plan(tmp_path, footprint={"checkpoint_bytes": 30 * 10**9}, size="g5.xlarge")
    assert not found.notice.fits
    findings = check_plan(found)
    assert any("does not fit the notice" in text for text in findings.warnings)
    assert "notice" not in findings.problems


@pytest.mark.parametrize(
    ("gigabytes", "advice"),
    [
        (99, "the cheapest size whose baseline network suffices is g6.8xlarge"),
        (400, "use on-demand capacity"),
    ],
)
def test_fails_on_a_checkpoint_over_the_notice_where_periodic_saves_do_not_help(
    gigabytes: int, advice: str, tmp_path: Path
) -> None:
    large = {"checkpoint_bytes": gigabytes * 10**9}
    found = found_in(tmp_path, footprint=large, size="g5.xlarge", rate_per_hour=20.0)
    assert advice in found.problems["notice"]


def test_a_checkpoint_over_the_host_memory_keeps_the_gpu_waiting(tmp_path: Path) -> None:
    large = {"checkpoint_bytes": 17_640_000_000}
    small = plan(tmp_path, footprint=large, size="g5.xlarge")
    assert not small.host.can_hold(small.inputs.checkpoint_bytes)
    found = check_plan(small).warnings
    assert any("keeps the GPU waiting" in text for text in found)
    large_enough = plan(tmp_path, footprint=large, size="g5.2xlarge")
    assert large_enough.host.can_hold(large_enough.inputs.checkpoint_bytes)


def test_several_gpus_share_the_global_batch(tmp_path: Path) -> None:
    one, four = (plan(tmp_path, size="g5.12xlarge", gpus=gpus).work.main.step for gpus in (1, 4))
    assert four.compute == pytest.approx(one.compute / 4)
    assert four.optimizer > one.optimizer  # gradients are exchanged, the optimizer is everywhere


def test_a_problem_can_be_accepted_by_name(tmp_path: Path) -> None:
    found = found_in(tmp_path, dataset_gib=300)
    assert "data_volume.gib=330 would hold it" in found.problems["volume"]
    assert found.accepting(("volume",)).problems == {}
    assert found.accepting(("volume",)).warnings[0].startswith("accepted: the dataset")
    with pytest.raises(ValueError, match="accept is 'volumes'"):
        found.accepting(("volumes",))


def test_idle_gpus_and_missing_bfloat16_are_said(tmp_path: Path) -> None:
    assert any("3 of 4 GPUs" in text for text in found_in(tmp_path, size="g5.12xlarge").warnings)
    assert any("bfloat16" in text for text in found_in(tmp_path, size="g4dn.xlarge").warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"notice_seconds": 900.0}, "EC2 gives at most 120"),
        ({"dataset_gib": -1.0}, "dataset_gib is -1.0"),
        ({"checkpoint_interval": "often"}, "cannot be read"),
    ],
)
def test_fails_on_what_cannot_be_planned(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, **changes)


def test_a_stage_that_accumulates_cannot_step_in_backward_and_needs_its_gradients() -> None:
    for recipe in ("full", "literal"):
        whole, half = (
            make_plan(
                Request(workload="growth", recipe=recipe, size="g5.2xlarge", micro_batch=n)
            ).gpu_memory_need
            for n in (16, 8)
        )
        assert half > whole + 5_000


def test_the_instance_store_is_read_at_the_least_rate_that_aws_publishes(tmp_path: Path) -> None:
    disk = {"data_on": "nvme", "volume_gib": 232}
    assert plan(tmp_path, size="g5.xlarge", **disk).inputs.volume.baseline == 40_625 * 4096 / 1e6
    # Nothing is published of this one: it counts as the volume.
    g6 = plan(tmp_path, size="g6.xlarge", **disk).inputs.volume
    assert g6 == plan(tmp_path, size="g6.xlarge").inputs.volume
    with pytest.raises(ValueError, match="data_on is 'ssd'; use ebs or nvme"):
        Request(workload="trajectory", recipe="full", size="g5.xlarge", data_on="ssd")


def test_a_detector_s_plan_has_the_memory_of_usual_and_of_the_largest_batches() -> None:
    plan = make_plan(Request(workload="detection", recipe="full", size="g5.2xlarge"))
    usual, largest = plan.work.memory.usual_need, plan.gpu_memory_need
    assert usual is not None and 3_000 < usual < largest < 22_888
    shown = dict(summary(plan))["GPU memory"]
    assert shown.startswith(f"{usual:,.0f} for batches of the average size, for the largest ")
    assert plan.notice.fits
    # COCO's twelve epochs are another order of magnitude.
    coco = make_plan(Request(workload="detection", recipe="coco_12", size="g5.2xlarge"))
    assert coco.hours_on_demand > 4 * plan.hours_on_demand
    # DN-Deformable-DETR-R50, a comparable model, took 55 h on an A100: detrex issue 120.
    work = make_plan(Request(workload="detection", recipe="coco_12", size="p4d.24xlarge")).work
    assert work.seconds_low < 55 * 3600 < work.seconds_high


def test_gradients_are_exchanged_over_the_gpus_own_links_and_behind_backward() -> None:
    """Eight A100 exchanged over a g5's PCIe, after backward: more than doubled a step's time."""

    def seconds(size: str, gpus: int) -> float:
        request = Request(workload="growth", recipe="full", size=size)
        shared = replace(request, gpus=gpus, micro_batch=8, batch=8 * gpus)
        stages = make_plan(shared).work.stages
        (stage,) = (each for each in stages if each.footprint.stage == "experts")
        return stage.step.seconds

    # Of 1.49 GB only the last bucket is not hidden: 2 x 7/8 of 25 MiB at 230 GB/s, 0.2 ms.
    assert seconds("p4d.24xlarge", 8) - seconds("p4d.24xlarge", 1) == pytest.approx(2e-4, rel=0.01)
    # 2 x 3/4 of 1.49 GB at 10 GB/s take 0.22 s, and backward hides two thirds of a step.
    alone = seconds("g5.12xlarge", 1)
    assert 0 < seconds("g5.12xlarge", 4) - alone < 0.223


def test_gpus_that_share_a_model_exchange_it_with_every_micro_batch(tmp_path: Path) -> None:
    whole, shared = (
        plan(tmp_path, size="g5.12xlarge", gpus=4, sharded=sharded, footprint={"gathered_bytes": 0})
        for sharded in (False, True)
    )
    assert shared.gpu_memory_need < whole.gpu_memory_need
    assert shared.work.main.step.optimizer > whole.work.main.step.optimizer
