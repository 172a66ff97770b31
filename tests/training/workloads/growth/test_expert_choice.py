"""The way to compute experts is the fastest that this machine can, and stays over a resume."""

import pytest
import torch

from tests.training.workloads.growth.models import small_config
from training.workloads.growth import experts
from training.workloads.growth.architecture import DENSE
from training.workloads.growth.expert_products import ExpertProducts
from training.workloads.growth.experts import choose_products

CPU = torch.device("cpu")


def chosen(dtype: torch.dtype = torch.float32, started_with: str | None = None) -> ExpertProducts:
    return choose_products(
        small_config(), num_tokens=6, device=CPU, dtype=dtype, started_with=started_with
    )


@pytest.mark.parametrize("fastest", ["split", "bmm", "grouped_mm"])
def test_the_fastest_is_chosen_however_slow_its_slowest_round(
    monkeypatch: pytest.MonkeyPatch, fastest: ExpertProducts
) -> None:
    rounds = iter([9.0, 0.1, 0.1, 0.1, 0.1])

    def seconds(bench: object, products: ExpertProducts) -> float:
        return next(rounds) if products == fastest else 1.0

    monkeypatch.setattr(experts._Bench, "seconds", seconds)
    assert chosen() == fastest


def test_one_is_chosen_by_real_steps_in_any_precision() -> None:
    assert chosen(torch.bfloat16) in ("split", "bmm", "grouped_mm")


def test_what_this_machine_cannot_compute_is_no_choice() -> None:
    # grouped_mm knows no float64.
    assert {chosen(torch.float64, "grouped_mm"), chosen(torch.float64)} <= {"split", "bmm"}


@pytest.mark.parametrize("products", ["split", "bmm", "grouped_mm"])
def test_what_the_stage_started_with_is_kept(products: ExpertProducts) -> None:
    assert chosen(started_with=products) == products


def test_a_model_without_experts_is_not_timed() -> None:
    assert choose_products(DENSE, num_tokens=4096, device=CPU, dtype=torch.float32) == "split"
