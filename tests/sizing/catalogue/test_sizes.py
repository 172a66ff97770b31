"""The instance catalogue: what it says about sizes known from elsewhere, and what it refuses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sizing import catalogue
from sizing.catalogue.gpus import find_gpu

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("size", "others"),
    [
        ("g5.xlarge", ["g5.2xlarge", "g5.4xlarge"]),
        ("g5.8xlarge", ["g5.16xlarge"]),
        ("g5.12xlarge", ["g5.24xlarge"]),
        ("g5.48xlarge", []),
        # p4de's A100 have 80 GB.
        ("p4d.24xlarge", []),
        ("g6.xlarge", ["g6.2xlarge", "g6.4xlarge", "gr6.4xlarge"]),
    ],
)
def test_alternates_have_the_same_gpus(size: str, others: list[str]) -> None:
    assert [each.size for each in catalogue.alternates(size)] == others


def test_a_price_factor_widens_the_alternates_to_the_four_cheapest() -> None:
    def wide(size: str) -> list[str]:
        return [each.size for each in catalogue.alternates(size, price_factor=5)]

    assert wide("g5.xlarge") == ["g5.2xlarge", "g5.4xlarge", "g5.8xlarge", "g5.16xlarge"]
    # Five L4 siblings; the dearest is left out.
    assert wide("g6.xlarge") == ["g6.2xlarge", "g6.4xlarge", "gr6.4xlarge", "g6.8xlarge"]


def test_other_numbers_of_the_same_gpu_are_alternates_where_asked_for() -> None:
    def mixed(size: str, factor: float) -> list[str]:
        found = catalogue.alternates(size, mix_gpu_counts=True, price_factor=factor)
        return [other.size for other in found]

    assert mixed("g5.xlarge", 2.1) == [
        *("g5.2xlarge", "g5.4xlarge", "g5.12xlarge", "g5.24xlarge", "g5.48xlarge")
    ]
    # Memory and price count per GPU: 48 GiB, $1.418.
    assert mixed("g5.12xlarge", 1.5) == ["g5.24xlarge", "g5.4xlarge", "g5.48xlarge"]


def test_alternates_never_have_less_nor_cost_more_than_twice_as_much() -> None:
    for size, wanted in catalogue.instances().items():
        found = catalogue.alternates(size)
        assert len(found) <= 4
        for other in found:
            assert (other.gpu, other.num_gpus) == (wanted.gpu, wanted.num_gpus)
            assert other.gpu_memory_mib == wanted.gpu_memory_mib
            assert other.memory_gib >= wanted.memory_gib
            assert other.on_demand_usd_per_hour and wanted.on_demand_usd_per_hour
            assert other.on_demand_usd_per_hour <= 2 * wanted.on_demand_usd_per_hour


def test_prices_say_how_far_to_believe_them() -> None:
    assert catalogue.hourly_price("g5.2xlarge").usd_per_hour == 1.212
    assert catalogue.hourly_price("g5.2xlarge").basis == "list price"
    seen, modelled = catalogue.spot_price("g5.2xlarge"), catalogue.spot_price("trn1.2xlarge")
    assert (seen.usd_per_hour, seen.basis) == (0.5933, "snapshot")
    assert (round(modelled.usd_per_hour / 1.34375, 2), modelled.basis) == (0.49, "modelled")
    assert "skypilot" in seen.source


def test_the_catalogue_loads_neither_torch_nor_cdk() -> None:
    program = (
        "import sys, sizing.catalogue; sizing.catalogue.instances();"
        "print(sorted({'torch', 'aws_cdk', 'boto3', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_size_of_a_fixed_network_rate_has_it_as_base_and_peak() -> None:
    # p3.8xlarge had 5 of its 10, p3.16xlarge 5 to 10 of its 25, trn2.3xlarge 50 of its 200.
    for instance in catalogue.instances().values():
        fixed = re.fullmatch(r"(\d+) Gigabit", instance.network_label)
        if fixed and not instance.note.startswith("multi-card"):
            rates = (instance.network_baseline_gbps, instance.network_peak_gbps)
            assert rates == (float(fixed[1]),) * 2, instance.size


def test_every_gpu_of_the_catalogue_has_its_peaks() -> None:
    for instance in catalogue.instances().values():
        if instance.num_gpus:
            gpu = find_gpu(instance.gpu, instance.gpu_memory_mib)
            assert gpu.tensor_tflops > gpu.tf32_tflops / 2 > 0


# The total that nvidia-smi shows: CUDA has less, a T4 with today's drivers 14,909 MiB.
NVIDIA_SMI_MIB = {
    "NVIDIA T4": 15_360,
    "NVIDIA A10G": 23_028,
    "NVIDIA L4": 23_034,
    "NVIDIA L40S": 46_068,
    "NVIDIA A100": 40_960,
    "NVIDIA A100 80GB": 81_920,
    "NVIDIA H100": 81_559,
    "NVIDIA H200": 143_771,
    "NVIDIA B200": 183_359,
    "NVIDIA RTX PRO Server 6000": 97_887,
}


def test_no_size_has_more_gpu_memory_than_its_driver_shows() -> None:
    for instance in catalogue.instances().values():
        if instance.num_gpus:
            name = find_gpu(instance.gpu, instance.gpu_memory_mib).name
            assert instance.gpu_memory_mib <= NVIDIA_SMI_MIB.get(name, 1e9), instance.size
    assert catalogue.find("g4dn.xlarge").gpu_memory_mib == 14_909


@pytest.mark.parametrize(
    ("size", "gbps"), [("g6e.24xlarge", 100), ("p4d.24xlarge", 100), ("p5en.48xlarge", 200)]
)
def test_a_machine_has_one_of_its_network_cards(size: str, gbps: float) -> None:
    instance = catalogue.find(size)
    assert (instance.network_baseline_gbps, instance.network_peak_gbps) == (gbps, gbps)
