"""Host memory: the four-worker incident of seed 000 is refused, one worker is accepted."""

import pytest

from sizing import catalogue
from sizing.models.constants import GIB, Constants
from sizing.models.host import host_memory

# 10,000 clips of 16 frames of 64x64x3 in float32, read into a list and stacked, by each process.
INCIDENT_BYTES = 10_000 * 16 * 64 * 64 * 3 * 4
MAPPED = 10_000 * 32 * 64 * 64 * 3


def test_four_workers_that_each_hold_the_dataset_are_refused() -> None:
    memory = host_memory(
        catalogue.find("g5.2xlarge"),
        Constants(),
        runs=4,
        data_bytes_each=INCIDENT_BYTES,
        load_copies=2,
    )
    assert memory.unshared == pytest.approx(31.46e9 / GIB, rel=1e-3)
    assert not memory.fits
    assert "4 runs need" in memory.sentence()


def test_one_worker_of_the_incident_is_accepted() -> None:
    memory = host_memory(
        catalogue.find("g5.2xlarge"), Constants(), data_bytes_each=INCIDENT_BYTES, load_copies=2
    )
    assert memory.fits


def test_four_workers_that_share_mapped_data_are_accepted() -> None:
    memory = host_memory(catalogue.find("g5.2xlarge"), Constants(), runs=4, shared_bytes=MAPPED)
    assert memory.fits
    assert memory.cache_bytes > MAPPED


def test_fails_on_no_runs() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        host_memory(catalogue.find("g5.2xlarge"), Constants(), runs=0)
