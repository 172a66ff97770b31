"""The language benchmark: contenders of the same size, that learn, and a table of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.contender_process import alone
from benchmarks.language import table
from benchmarks.language.contender import Contender, Trainer
from benchmarks.language.peers import hugging_face_dense, hugging_face_experts, plain
from benchmarks.language.shapes import PHASES, SCALES, flops_per_step, gated
from training.growth.architecture import DENSE, EXPERTS, GROWN
from training.growth.model import parameter_counts

ROOT = Path(__file__).parents[2]


def test_the_full_scale_is_the_seeds() -> None:
    assert tuple(SCALES["full"].models.values()) == (DENSE, EXPERTS, GROWN)
    assert SCALES["full"].tokens_per_step == 4096


@pytest.mark.parametrize("phase", PHASES)
def test_peers_have_as_many_parameters(phase: str) -> None:
    config = SCALES["full"].models[phase]
    total = parameter_counts(config)[0]
    with torch.device("meta"):
        theirs = (
            hugging_face_dense(config)
            if phase == "dense"
            else hugging_face_experts(gated(config), "eager")
        )
        by_hand, _ = plain(config)
    # GPTNeoX is the same to the last; what has SwiGLU is as near as its width allows; the plain
    # loop has 2048 learned positions more.
    size = sum(parameter.numel() for parameter in theirs[0].parameters())
    assert size == total if phase == "dense" else abs(size / total - 1) < 0.002
    assert sum(p.numel() for p in by_hand.parameters()) == total + 2048 * config.width


def test_a_steps_flops_are_those_that_are_counted_on_fake_tensors() -> None:
    """13.76 TFLOP for the grown model at 16 x 256: what `measure_step` counts of our own step."""
    counted = flops_per_step(GROWN, parameter_counts(GROWN)[1], SCALES["full"])
    assert counted == pytest.approx(13.76e12, rel=0.02)


@pytest.mark.parametrize(
    "contender",
    [
        Contender(who="ours", phase="dense", scale="tiny", device="cpu"),
        Contender(who="ours gated", phase="experts", scale="tiny", device="cpu", experts="bmm"),
        Contender(who="plain loop", phase="experts", scale="tiny", device="cpu"),
        Contender(
            who="ours",
            phase="grown",
            scale="tiny",
            device="cpu",
            experts="split",
            recompute=True,
            in_backward=True,
            bfloat16_moments=True,
        ),
    ],
    ids=lambda contender: contender.name,
)
def test_a_contender_learns_its_batch(contender: Contender) -> None:
    trainer = Trainer(contender)
    first, last = trainer.steps(1), trainer.steps(8)
    assert last["result"] < first["result"] < 6.0
    assert last["seconds"] > 0 and last["mib"] > 0


def test_fails_for_a_scale_or_phase_that_does_not_exist() -> None:
    with pytest.raises(
        ValueError, match="no scale 'huge'; give one of tiny, eighth, quarter, full"
    ):
        table.measure(scale="huge", rounds=1, seconds=1)
    with pytest.raises(ValueError, match="no phase 'moe'; give some of dense, experts, grown"):
        table.measure(scale="tiny", rounds=1, seconds=1, phases=["moe"])


@pytest.mark.slow
def test_a_contender_that_fails_is_a_row_with_its_reason() -> None:
    broken = Contender(who="ours", phase="experts", scale="tiny", device="cpu", experts="loop")
    result = alone("benchmarks.language", broken, 1e18, **table._ON_GPU)
    (row,) = table._rows("experts", [broken], [result], 1.0)
    assert row["note"].startswith("ValueError: expert products 'loop' do not exist; give one of")
    assert row["tokens/s"] == ""


@pytest.mark.slow
def test_the_dry_run_measures_every_contender() -> None:
    command = [sys.executable, "-m", "benchmarks", "language", "--cpu", "--scale=tiny"]
    done = subprocess.run(
        [*command, "--rounds=1", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    machine, *rows = json.loads(done.stdout)["rows"]
    assert "TFLOP/s" in machine["note"]
    assert len(rows) == 3 + 8 + 8 + 3
    assert [row for row in rows if row["note"] or not row["tokens/s"]] == []
