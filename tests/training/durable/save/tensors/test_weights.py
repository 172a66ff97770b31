"""Files of weights that other programs saved, as those programs' own loaders read them."""

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from contract.errors import UserError
from training.durable import Weights


def _model(value: float) -> nn.Module:
    model = nn.Linear(2, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _saved(path: Path, **content: Any) -> Path:
    torch.save({"epoch": 3, "args": argparse.Namespace(lr=0.1, out=Path("out")), **content}, path)
    return path


def _averaged() -> dict[str, Any]:
    """As torchvision's program saves it: `module.` before each name, and a counter."""
    averaged = AveragedModel(_model(1.0), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(_model(2.0))
    return averaged.state_dict()


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ({"model": _model(1.0).state_dict()}, 1.0),
        ({"state_dict": _model(1.0).state_dict()}, 1.0),
        ({"state_dict": _model(1.0).state_dict(), "state_dict_ema": _model(2.0).state_dict()}, 2.0),
        ({"state_dict": _model(1.0).state_dict(), "state_dict_ema": None}, 1.0),
        ({"model": "compiled"}, 1.0),
        ({"model": _model(1.0).state_dict(), "model_ema": _averaged()}, 2.0),
    ],
    ids=[
        "torchvision",
        "timm",
        "timm's average",
        "no average",
        "compiled",
        "torchvision's average",
    ],
)
@pytest.mark.parametrize("name", ["checkpoint.pth", "model_best.pth.tar", "last.ckpt"])
def test_a_training_program_s_file_is_read_as_timm_reads_it(
    tmp_path: Path, content: dict[str, Any], value: float, name: str, caplog: Any
) -> None:
    timm = pytest.importorskip("timm.models", exc_type=ImportError)
    if content.get("model") == "compiled":  # takes seconds
        content = {"model": torch.compile(_model(1.0)).state_dict()}
    path = _saved(tmp_path / name, **content)
    caplog.set_level(logging.INFO)
    found = Weights.read(str(path)).tensors
    assert ("moving average" in caplog.text) == (value == 2.0)
    assert {name: set(each.flatten().tolist()) for name, each in found.items()} == {
        "weight": {value},
        "bias": {value},
    }
    with torch.serialization.safe_globals([argparse.Namespace, type(Path())]):
        theirs = timm.load_state_dict(str(path))
    theirs.pop("n_averaged", None)
    assert len(theirs) == 2
    for (_, ours), other in zip(
        sorted(found.items()), (theirs[n] for n in sorted(theirs)), strict=True
    ):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("content", [{"net": {"weight": torch.zeros(2)}}, {"model": {}}])
def test_fails_for_a_file_without_a_state_dict(tmp_path: Path, content: dict[str, Any]) -> None:
    path = _saved(tmp_path / "checkpoint.pth", **content)
    with pytest.raises(UserError, match=r"is not a state dict and has none under 'state_dict_ema'"):
        Weights.read(str(path))


class _Unknown:
    """A class of the program that saved the file."""


def test_fails_for_a_file_that_would_run_code(tmp_path: Path) -> None:
    path = _saved(tmp_path / "checkpoint.pth", model=_model(1.0).state_dict(), more=_Unknown())
    with pytest.raises(UserError, match="cannot be read as tensors alone"):
        Weights.read(str(path))
