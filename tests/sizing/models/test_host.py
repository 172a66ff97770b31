"""Host memory: the four-worker incident of seed 000 is refused, one worker is accepted."""

import json
from pathlib import Path

import pytest

from sizing import catalogue
from sizing.models import footprints
from sizing.models.constants import GIB, Constants
from sizing.models.footprints import Footprint
from sizing.models.host import host_memory, start_memory
from tests.sizing import sample_footprints

# 10,000 clips of 16 frames of 64x64x3 in float32, read into a list and stacked, by each process.
INCIDENT_BYTES = 10_000 * 16 * 64 * 64 * 3 * 4
MAPPED = 10_000 * 32 * 64 * 64 * 3


def test_four_workers_that_each_hold_the_dataset_are_refused_and_one_is_not() -> None:
    memory = host_memory(
        catalogue.find("g5.2xlarge"),
        Constants(),
        runs=4,
        data_bytes_each=INCIDENT_BYTES,
    )
    assert memory.unshared == pytest.approx(31.46e9 / GIB, rel=1e-3)
    assert not memory.fits
    assert "4 runs need" in memory.sentence()
    alone = host_memory(catalogue.find("g5.2xlarge"), Constants(), data_bytes_each=INCIDENT_BYTES)
    assert alone.fits


def test_four_workers_that_share_mapped_data_are_accepted() -> None:
    memory = host_memory(catalogue.find("g5.2xlarge"), Constants(), runs=4)
    assert memory.fits
    assert memory.cache_bytes > MAPPED


def stages(folder: Path, *held: tuple[float, float]) -> tuple[Footprint, ...]:
    """Train stages of which only what they hold matters: GiB of parameters, of the optimizer."""
    rows = [
        sample_footprints.row(
            f"stage {number}",
            16,
            parameter_bytes=int(parameters * GIB),
            optimizer_bytes=int(optimizer * GIB),
            checkpoint_bytes=int((parameters + optimizer) * GIB),
        )
        for number, (parameters, optimizer) in enumerate(held)
    ]
    path = folder / f"{len(rows)}.json"
    path.write_text(json.dumps({"format": 2, "footprints": rows}))
    return footprints.counted_stages("trajectory", "full", path=path)


def test_a_stage_holds_its_model_and_what_it_starts_from(tmp_path: Path) -> None:
    memory = start_memory(stages(tmp_path, (1.5, 3.0), (6.0, 6.0)))
    # The model as it is built; the checkpoint, or the model and optimizer of the stage before.
    assert memory.resume == pytest.approx(6.0 + 12.0)
    assert memory.grow == pytest.approx(6.0 + 1.5 + 3.0)
    alone = start_memory(stages(tmp_path, (1.5, 3.0)))
    assert (alone.resume, alone.grow) == (pytest.approx(1.5 + 4.5), 0.0)
    assert start_memory([]).most == 0.0


def test_a_start_that_does_not_fit_is_refused_and_takes_nothing_from_the_page_cache(
    tmp_path: Path,
) -> None:
    starting = start_memory(stages(tmp_path, (1.5, 3.0), (6.0, 6.0)))
    little = host_memory(catalogue.find("g5.xlarge"), Constants(), starting=starting)
    assert not little.fits
    assert little.need == pytest.approx(3.0 + 18.0)
    assert "18.0 while a stage starts: 18.0 to resume, 10.5 to start from" in little.sentence()
    assert host_memory(catalogue.find("g5.2xlarge"), Constants(), starting=starting).fits
    without = host_memory(catalogue.find("g5.xlarge"), Constants())
    assert little.cache_bytes == without.cache_bytes > 0
    assert "0.0 while loading" in without.sentence()
