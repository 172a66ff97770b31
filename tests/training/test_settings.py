"""How long a stage is and when it is evaluated; what does not fit together is refused."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch

from contract.errors import UserError
from tests.training.tiny import tiny_config
from training.registry import with_overrides
from training.settings import (
    Milestones,
    Settings,
    changed,
    check_fields,
    field_places,
    recorded,
)


def settings(**changes: Any) -> Settings:
    length = {} if "steps" in changes else {"epochs": 3}
    return Settings(**{"global_batch": 8, "micro_batch": 4, **length, **changes})


@pytest.mark.parametrize(
    ("changes", "steps", "evaluations"),
    [
        ({}, 12, 3),
        ({"evaluate_every_epochs": 2}, 12, 2),
        ({"evaluate_every_epochs": 0}, 12, 1),
        ({"evaluate_every_steps": 5}, 12, 3),
        ({"steps": 10}, 10, 3),
        ({"steps": 10, "evaluate_every_steps": 0}, 10, 1),
        ({"steps": 10, "evaluate_every_steps": 5}, 10, 2),
        ({"drop_last": True}, 9, 3),
        ({"drop_last": True, "evaluate_every_epochs": 2}, 9, 2),
    ],
)
def test_a_stage_has_so_many_steps_and_evaluations(
    changes: dict[str, Any], steps: int, evaluations: int
) -> None:
    """Of 30 samples: an epoch has four steps."""
    stage = settings(**changes)
    assert (stage.num_steps(30), stage.num_evaluations(30)) == (steps, evaluations)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"micro_batch": 3}, "not a multiple of micro_batch 3"),
        ({"epochs": 0}, "epochs is 0; use at least 1"),
        ({"steps": 0}, "steps is 0; use at least 1"),
        ({"epochs": 1, "steps": 9}, "epochs is 1 and steps is 9; use one of the two"),
        (
            {"evaluate_every_epochs": 1, "evaluate_every_steps": 9},
            "evaluate_every_epochs is 1 and evaluate_every_steps is 9; use one of the two",
        ),
        ({"evaluate_every_steps": -1}, "evaluate_every_steps is -1; use at least 0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0; use None or a number in"),
        ({"ema_buffers": True}, "or ema_buffers without an average; set ema_decay"),
        ({"ema_decay": 0.9, "ema_every_steps": 0}, "ema_every_steps is 0; use at least 1"),
        ({"optimizer_in_backward": True}, "with global_batch 8 and micro_batch 4: the first"),
        (
            {"optimizer_in_backward": True, "micro_batch": 8, "clip_norm": 1.0},
            "optimizer_in_backward with clip_norm 1.0: the norm is known only once all gradients",
        ),
        (
            {"optimizer_in_backward": True, "micro_batch": 8, "precision": "float16"},
            "optimizer_in_backward with precision 'float16': whether a step is skipped",
        ),
        ({"schedule": "step"}, "schedule is 'step'; use Milestones, a function or one of"),
        ({"best_metric": "loss"}, "'loss' is best where it is lowest; set best_mode='min'"),
    ],
)
def test_fails_for_settings_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings(**changes)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"factor": 0.0, "steps": (1,)}, "factor is 0.0; use a positive number"),
        ({"factor": 0.1}, r"at epochs \(\) and steps \(\); use one of the two"),
        ({"factor": 0.1, "epochs": (3,), "steps": (1,)}, "use one of the two"),
        ({"factor": 0.1, "epochs": (3, 2)}, r"milestones at \(3, 2\); use increasing numbers"),
        ({"factor": 0.1, "steps": (0, 2)}, "use increasing numbers from 1"),
    ],
)
def test_fails_for_milestones_that_cannot_be(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Milestones(**given)


def test_fails_for_a_stage_without_a_length() -> None:
    with pytest.raises(UserError, match="epochs is None and steps is None; set one of the two"):
        settings(epochs=None).num_steps(30)


@dataclass(frozen=True, kw_only=True)
class Two:
    """A config with settings of two stages, and a field called like one of theirs."""

    steps: int = 7
    settings: Settings = Settings(steps=1, global_batch=8, micro_batch=4)  # noqa: RUF009
    teacher: Settings = Settings(epochs=2, global_batch=8, micro_batch=8)  # noqa: RUF009


def test_a_name_that_several_fields_have_says_whose_it_is() -> None:
    places = field_places(Two())
    assert places["steps"] == ("steps",)
    assert places["settings.steps"] == ("settings", "steps")
    assert places["teacher.micro_batch"] == ("teacher", "micro_batch")
    config = changed(Two(), steps=8, **{"settings.steps": 2, "teacher.micro_batch": 2})
    assert (config.steps, config.settings.steps, config.teacher.micro_batch) == (8, 2, 2)


def test_every_field_is_recorded_by_its_name_as_json() -> None:
    config = tiny_config(schedule=Milestones(factor=0.1, epochs=(2,)))
    record = recorded(config)
    assert json.loads(json.dumps(record)) == {
        **json.loads(json.dumps(record)),
        "micro_batch": 4,
        "dropout": 0.2,
        "schedule": {"factor": 0.1, "epochs": [2], "steps": []},
    }
    schedules = {half: f"{__name__}.half", Third(): f"{__name__}.Third"}
    schedules[partial(pow, 2, mod=None)] = ["builtins.pow", 2, {"mod": None}]
    for schedule, expected in schedules.items():
        assert recorded(tiny_config(schedule=schedule))["schedule"] == expected


@dataclass(frozen=True)
class Sized:
    size: Literal[8, 16] = 16
    dtype: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_a_literal_may_have_numbers() -> None:
    assert with_overrides(Sized(), {"size": "8"}, "c").size == 8
    with pytest.raises(UserError, match="size='9' is not a valid Literal"):
        with_overrides(Sized(), {"size": "9"}, "c")
    with pytest.raises(ValueError, match="size is 9; use one of 8, 16"):
        Sized(size=9)  # type: ignore[arg-type]


def test_fails_for_a_value_that_cannot_be_recorded() -> None:
    with pytest.raises(UserError, match=r"dtype is torch.float16, which JSON cannot hold"):
        recorded(Sized(dtype=torch.half))


class Third:
    def __call__(self, step: int, num_steps: int) -> float:
        return 0.3


def half(step: int, num_steps: int) -> float:
    return 0.5


def test_fails_where_drop_last_leaves_no_step() -> None:
    """In `measure` too, which divides by the steps of an epoch."""
    stage = settings(drop_last=True)
    with pytest.raises(UserError, match="drop_last with 7 training samples leaves no step of 8"):
        stage.steps_per_epoch(7)
