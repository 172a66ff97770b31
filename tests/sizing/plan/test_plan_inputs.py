"""A dataset's own manifest in place of what is usual: its bytes, its samples, its images."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sizing.__main__ import main
from sizing.models.data_path import DATA
from sizing.plan.checks import check_plan
from sizing.plan.plan_inputs import DatasetFacts, Request, read_manifest
from sizing.plan.report import summary
from sizing.plan.size_plan import Plan, make_plan

META = {
    "splits": {"train": 1_281_167, "validation": 50_000},
    "image_bytes": 16_500,
    "image_pixels": 87_000,
}


def write(path: Path, meta: Mapping[str, Any]) -> Path:
    shards = [22 * 10**6] * 1000
    files = [{"name": f"{n}.tar", "bytes": size, "sha256": "-"} for n, size in enumerate(shards)]
    path.write_text(json.dumps({"name": "small", "files": files, "meta": meta}))
    return path


def imagenet(dataset: DatasetFacts | None, size: str = "g5.2xlarge") -> Plan:
    return make_plan(Request(workload="imagenet", recipe="full", size=size, dataset=dataset))


def test_smaller_images_take_less_of_disk_and_loader(tmp_path: Path) -> None:
    usual, small = imagenet(None), imagenet(read_manifest(write(tmp_path / "m.json", META)))
    before, after = (dict(each.work.main.phases[0].waits) for each in (usual, small))
    assert before["disk"] == pytest.approx(1_281_167 * 0.11 / 106.25)
    # 22 GB stay in the page cache of 32 GiB.
    assert after["disk"] == 0
    a_sample = after["loader CPU"] / before["loader CPU"]
    usual_seconds = DATA["imagenet"].loader_cpu_seconds
    assert a_sample == pytest.approx(1 - (0.2 - 0.087) / 290 / 0.2 / usual_seconds)
    assert small.inputs.dataset_bytes == 22 * 10**9
    # A window of 16 shards, and what was on its way, less what came while the trainer started.
    missing = 1 - small.first.first_step * 131.072e6 / 22e9
    assert small.first.sync == pytest.approx((16 * 22e6 + 2**27) * missing / 131.072e6)
    assert small.first.sync < usual.first.sync / 5


def test_a_stage_of_which_no_less_is_known_needs_the_whole_dataset(tmp_path: Path) -> None:
    inputs = imagenet(read_manifest(write(tmp_path / "m.json", META))).inputs
    (stage,) = inputs.footprints
    assert inputs.first_bytes(stage) == 16 * 22e6
    assert inputs.first_bytes(replace(stage, first_files=None)) == 22e9
    assert inputs.first_bytes(replace(stage, first_files=2000)) == 22e9
    without = replace(inputs, request=replace(inputs.request, dataset=None))
    assert without.first_bytes(stage) == 16 * 2**27
    assert replace(without, facts=None).first_bytes(stage) == 22e9


def test_a_smaller_dataset_has_shorter_epochs(tmp_path: Path) -> None:
    meta = {**META, "splits": {"train": 128_117, "validation": 5_000}}
    part = imagenet(read_manifest(write(tmp_path / "m.json", meta)))
    assert part.work.main.footprint.steps_per_epoch == 126
    whole = imagenet(None)
    assert part.work.main.epoch_seconds == pytest.approx(whole.work.main.epoch_seconds / 10, 0.01)


def test_a_dataset_of_the_recipe_s_own_samples_changes_no_stage() -> None:
    # The Prepare stage reads the samples of the validation, too.
    request = Request(workload="trajectory", recipe="full", size="g5.xlarge")
    dataset = DatasetFacts(name="own", num_bytes=10**9, train_samples=8_000)
    usual, own = (make_plan(replace(request, dataset=each)).inputs for each in (None, dataset))
    assert own.footprints == usual.footprints


def test_a_stage_of_steps_keeps_them_whatever_the_dataset() -> None:
    request = Request(workload="growth", recipe="full", size="g5.2xlarge")
    half = replace(request, samples=900_000)
    for asked, steps in ((request, 1000), (half, 1000), (replace(half, epochs=0.01), 563)):
        for stage in make_plan(asked).inputs.footprints:
            assert math.ceil(stage.steps_per_epoch * stage.epochs) == steps
            assert stage.evaluations == (4 if asked.epochs is None else 5)


def test_a_manifest_that_counts_no_images_says_its_bytes_only(tmp_path: Path) -> None:
    meta = {"splits": {"train": {"tokens": 5, "documents": 2}}}
    found = read_manifest(write(tmp_path / "m.json", meta))
    assert (found.train_samples, found.sample_bytes, found.num_bytes) == (None, None, 22 * 10**9)
    assert found.applied(DATA["growth"]) == DATA["growth"]


def test_the_summary_says_what_each_part_could_bring_the_slowest_first(tmp_path: Path) -> None:
    rates = dict(summary(imagenet(None, "g5.xlarge")))["samples a second"]
    assert rates.startswith("loader CPU 630, disk (87.5 MB/s) 795, GPU memory bandwidth 8")
    small = imagenet(read_manifest(write(tmp_path / "m.json", META)))
    assert "no disk after the first epoch" in dict(summary(small))["samples a second"]


@pytest.mark.parametrize("content", ["", "[]", '{"files": [{}]}', '{"files": [], "meta": 1}'])
def test_fails_for_what_is_no_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "m.json"
    path.write_text(content)
    assert main(["plan", "imagenet", "--size=g5.2xlarge", f"--manifest={path}"]) == 2
    assert f"{path} is not a dataset manifest (" in capsys.readouterr().err


def test_another_workload_s_manifest_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"workload": "growth", "name": "prose", "files": [], "meta": {}}))
    assert main(["plan", "trajectory", "--size=g5.xlarge", f"--manifest={path}"]) == 2
    said = capsys.readouterr().err
    assert "'prose' is a dataset of workload growth, not of trajectory" in said


@pytest.mark.parametrize(
    ("size", "data_on", "pixels", "sentence"),
    [
        (
            "g5.2xlarge",
            "ebs",
            200_000,
            "waits for the disk: a larger size of the family or its instance store (data_on=nvme) "
            "or a dataset of smaller images (data import --override shorter_side=256) is faster",
        ),
        ("g5.xlarge", "nvme", 87_000, "the loader CPU: a larger size of the family is faster, a"),
    ],
)
def test_a_stage_that_waits_for_data_is_told_what_is_faster(
    size: str, data_on: str, pixels: float, sentence: str
) -> None:
    dataset = DatasetFacts(
        name="own", num_bytes=140 * 10**9, sample_bytes=110_000, sample_pixels=pixels
    )
    request = Request(
        workload="imagenet", recipe="epochs_16", size=size, data_on=data_on, dataset=dataset
    )
    assert any(sentence in warning for warning in check_plan(make_plan(request)).warnings)


@pytest.mark.parametrize(("num_bytes", "says"), [(1000, True), (3_000_000, False)])
def test_a_dataset_whose_files_take_longer_than_its_bytes_is_told_to_be_packed(
    num_bytes: int, says: bool
) -> None:
    files = (num_bytes,) * 1_281_167
    dataset = DatasetFacts(name="own", num_bytes=sum(files), file_bytes=files)
    plan = imagenet(dataset)
    packed = imagenet(replace(dataset, file_bytes=(sum(files),)))
    assert (plan.hours_on_demand - packed.hours_on_demand > 0.1) is says
    found = check_plan(plan).warnings
    sentence = "a sync of 1,281,167 files takes about 32 minutes and $0.51 on each machine"
    assert any(sentence in warning for warning in found) is says


def test_a_recipe_with_smaller_features_fetches_fewer_bytes() -> None:
    full, reference = (
        make_plan(Request(workload="trajectory", recipe=recipe, size="g5.xlarge")).inputs
        for recipe in ("full", "reference")
    )
    assert full.facts is not None and reference.facts is not None
    # Per clip: 32 frames x 64 cells x 128 channels x 2 bytes; 32 frames x 512 x 2 bytes.
    assert full.facts.epoch_bytes_per_sample == 524_288
    assert reference.facts.epoch_bytes_per_sample == 32_768
    assert reference.artifact_bytes == full.artifact_bytes / 16
