"""How a Train stage is trained: its length, batches, learning-rate schedule, precision, average.

Settings that do not fit together are refused here, each with one sentence. A config has them in a
field, `settings`, and their fields are named as if they were the config's own.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial, reduce
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from contract.errors import UserError

_NONE: Mapping[float, Sequence[str]] = MappingProxyType({})


def check_fields(
    config: Any,
    *,
    at_least: Mapping[float, Sequence[str]] = _NONE,
    above_0: Sequence[str] = (),
    shares: Sequence[str] = (),
    below_1: Sequence[str] = (),
) -> None:
    """Refuse values that a field cannot have; a Literal type says what its field accepts.

    `at_least`: a minimum -> the fields that it applies to where they hold a number.
    """
    kind: type = type(config)
    for name, known in _choices(kind).items():
        check_choice(name, getattr(config, name), known)
    for least, names in at_least.items():
        for name in names:
            if (value := getattr(config, name)) not in (None, "auto") and value < least:
                raise ValueError(f"{name} is {value}; use at least {least}")
    for name in above_0:
        if (value := getattr(config, name)) <= 0:
            raise ValueError(f"{name} is {value}; use more than 0")
    for name in shares:
        if not 0.0 <= (value := getattr(config, name)) <= 1.0:
            raise ValueError(f"{name} is {value}; use a share from 0 to 1")
    for name in below_1:
        if not 0.0 <= (value := getattr(config, name)) < 1.0:
            raise ValueError(f"{name} is {value}; use at least 0 and less than 1")


@cache
def _choices(kind: type) -> Mapping[str, tuple[Any, ...]]:
    """What each field of a Literal type accepts; a workload may make its settings at each step."""
    hints = get_type_hints(kind).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def check_choice(name: str, value: Any, known: Iterable[Any], other: str = "") -> None:
    """Refuse a value that is not one of the known ones; `other` says what else is accepted."""
    if value not in (known := tuple(known)):
        raise ValueError(f"{name} is {value!r}; use {other}one of {', '.join(map(str, known))}")


Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
_Schedule: TypeAlias = Literal["constant", "cosine", "linear"]
# "auto": as many processes per rank as this machine's vCPUs allow.
LoaderWorkers: TypeAlias = int | Literal["auto"]
_CompileMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"]
# (step, num_steps) -> factor, a pure function; `step` counts from 0 within the stage.
_ScheduleFunction: TypeAlias = Callable[[int, int], float]

_T = TypeVar("_T")
# An epoch of a small dataset should have as many, if its batch is chosen for it.
_FEW_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Milestones:
    """A schedule that multiplies the learning rate by `factor` at each of these epochs or steps."""

    factor: float
    epochs: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"the milestones' factor is {self.factor}; use a positive number")
        at = self.epochs or self.steps
        if not at or (self.epochs and self.steps):
            raise ValueError(
                f"milestones at epochs {self.epochs} and steps {self.steps}; use one of the two"
            )
        if min(at) < 1 or list(at) != sorted(set(at)):
            raise ValueError(f"milestones at {at}; use increasing numbers from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to train a Train stage. Learning rate and weight decay belong to the stage's optimizer.

    A stage lasts `epochs` epochs, or `steps` steps, in which case it may end in mid-epoch. A step
    takes `global_batch` samples over all ranks, in micro-batches of `micro_batch`; the last step of
    an epoch takes the remainder, so every sample is seen exactly once per epoch. With `drop_last`,
    the remainder, which differs in every epoch, is skipped instead. A step whose batches weigh 0,
    such as images without objects, is a step like any other, whose loss is not divided (`Loss`).

    The schedule multiplies each parameter group's own learning rate: up linearly over
    `warmup_steps`, and by one of these: constant; along half a cosine, or linearly, from the end of
    the warmup down to `final_lr_fraction` at the stage's last step; `Milestones`; or any function
    (step, num_steps) -> factor. Such a function is code, like the loss: it must depend only on its
    arguments and the config.

    Evaluation runs on split "validation" every `evaluate_every_epochs` epochs or
    `evaluate_every_steps` steps of the stage (0: only at the end; neither: every epoch) and always
    at the end of the stage; the checkpoint with the best `best_metric` is kept. A stage that is
    evaluated only at the end, without `best_metric`, needs no samples for it.

    With `ema_decay`, an exponential moving average of the parameters, updated after every
    `ema_every_steps` steps, is evaluated and passed on to the next stage and to final/;
    `ema_buffers` averages the model's floating-point buffers, such as BatchNorm's statistics, as
    well. `optimizer_in_backward` updates each parameter, and frees its gradient, as soon as
    backward has computed it: for optimizers that treat every parameter by itself.
    Gradients are summed in the same order on 1, 2, 4 or 8 ranks, the only numbers allowed
    (`reduction` "tree"); "ring" allows any number and leaves the order to NCCL or gloo, so that
    another number of ranks gives other bits.
    With `sharding` "full", each of several ranks keeps a share of parameters, gradients and
    optimizer state (FSDP2), in the blocks that the stage names (`Train.sharded_modules`) or as one
    block; a single process shards nothing. `loader_workers` processes make batches ahead of the
    step ("auto": as many as the machine's vCPUs allow); batches do not depend on their number, so
    another attempt may change it.

    A config's settings may omit the length if each of its stages fills in its own.
    """

    epochs: int | None = None
    steps: int | None = None
    global_batch: int
    micro_batch: int
    drop_last: bool = False
    eval_batch: int = 64
    schedule: _Schedule | Milestones | _ScheduleFunction = "cosine"
    warmup_steps: int = 0
    final_lr_fraction: float = 0.0
    clip_norm: float | None = None
    optimizer_in_backward: bool = False
    evaluate_every_epochs: int | None = None
    evaluate_every_steps: int | None = None
    precision: Precision = "float32"
    compile_mode: _CompileMode | None = None
    ema_decay: float | None = None
    ema_every_steps: int = 1
    ema_buffers: bool = False
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    sharding: Literal["none", "full"] = "none"
    reduction: Literal["tree", "ring"] = "tree"
    loader_workers: LoaderWorkers = 0

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.compile_mode is not None:
            check_choice("compile_mode", self.compile_mode, get_args(_CompileMode), "None or ")
        if not isinstance(self.schedule, Milestones) and not callable(self.schedule):
            known = get_args(_Schedule)
            check_choice("schedule", self.schedule, known, "Milestones, a function or ")
        if self.ema_decay is None and (self.ema_every_steps != 1 or self.ema_buffers):
            raise ValueError("ema_every_steps or ema_buffers without an average; set ema_decay")
        if (self.best_metric, self.best_mode) == ("loss", "max"):
            raise ValueError("best_metric='loss' is best where it is lowest; set best_mode='min'")
        if self.optimizer_in_backward:
            self._check_in_backward()

    def _check_numbers(self) -> None:
        every = ("evaluate_every_epochs", "evaluate_every_steps")
        for names in (("epochs", "steps"), every):
            one, other = (getattr(self, name) for name in names)
            if one is not None and other is not None:
                raise ValueError(
                    f"{names[0]} is {one} and {names[1]} is {other}; use one of the two, as with "
                    f"--override {names[0]}=none"
                )
        batches = ("global_batch", "micro_batch", "eval_batch")
        check_fields(
            self,
            at_least={
                1: ("epochs", "steps", *batches, "ema_every_steps"),
                0: ("warmup_steps", *every, "loader_workers"),
            },
        )
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch "
                f"{self.micro_batch}; change one of them"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; use a positive norm or None")
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ValueError(f"ema_decay is {self.ema_decay}; use None or a number in (0, 1)")

    def _check_in_backward(self) -> None:
        """Refuse conflicting settings; several ranks are refused where their number is known."""
        if self.global_batch > self.micro_batch:
            raise ValueError(
                f"optimizer_in_backward with global_batch {self.global_batch} and micro_batch "
                f"{self.micro_batch}: the first backward would update before the gradients are "
                "accumulated; set micro_batch to global_batch"
            )
        if self.clip_norm is not None:
            raise ValueError(
                f"optimizer_in_backward with clip_norm {self.clip_norm}: the norm is known only "
                "once all gradients are, when they have been used already; set clip_norm=None"
            )
        if self.precision == "float16":
            raise ValueError(
                "optimizer_in_backward with precision 'float16': whether a step is skipped is "
                "known only once all its gradients are; use 'bfloat16' or 'float32'"
            )

    def steps_per_epoch(self, num_samples: int) -> int:
        """Return the steps of a full epoch over that many training samples, at least one."""
        if why := self.why_no_step(num_samples):
            raise UserError(why)
        whole = num_samples // self.global_batch
        return whole if self.drop_last else math.ceil(num_samples / self.global_batch)

    def why_no_step(self, num_samples: int) -> str:
        """Return why an epoch of so few samples would have no step, and what would give it some."""
        if not num_samples:
            return "split train has no samples; add some"
        if not self.drop_last or num_samples >= self.global_batch:
            return ""
        batch = self.global_batch
        while batch > 1 and batch * _FEW_STEPS > num_samples:
            batch //= 2
        return (
            f"drop_last with {num_samples} training samples leaves no step of {self.global_batch}; "
            f"pass --override global_batch={batch} --override micro_batch="
            f"{math.gcd(batch, self.micro_batch)}, or drop_last=False"
        )

    def num_steps(self, num_samples: int) -> int:
        """Return the stage's length in steps."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise UserError("epochs is None and steps is None; set one of the two")
        return self.epochs * self.steps_per_epoch(num_samples)

    def weights_left(self, num_steps: int) -> float:
        """Return the share in the average, after so many steps, of the weights before them."""
        if self.ema_decay is None:
            return 0.0
        return float(self.ema_decay ** (num_steps // self.ema_every_steps))

    def steps_per_evaluation(self, num_samples: int) -> int:
        """Return the steps from one evaluation to the next; 0 means only at the end."""
        if self.evaluate_every_steps is not None:
            return self.evaluate_every_steps
        epochs = 1 if self.evaluate_every_epochs is None else self.evaluate_every_epochs
        return epochs * self.steps_per_epoch(num_samples)

    @property
    def needs_validation(self) -> bool:
        """Whether a stage without samples to evaluate is refused."""
        every = self.evaluate_every_epochs, self.evaluate_every_steps
        return self.best_metric is not None or 0 not in every

    def num_evaluations(self, num_samples: int) -> int:
        """Return the stage's number of evaluations, including the one at its end."""
        every = self.steps_per_evaluation(num_samples)
        return math.ceil(self.num_steps(num_samples) / every) if every else 1


def field_places(config: Any) -> dict[str, tuple[str, ...]]:
    """Map each field name of a config to its place, nested `Settings` included.

    A name that occurs more than once stands for the config's own field; the others are named by
    their full place (`settings.steps`), which overrides accept for every field.
    """
    places: list[tuple[str, ...]] = []
    for field in fields(config):
        inner = getattr(config, field.name)
        nested = fields(inner) if isinstance(inner, Settings) else ()
        places += [(field.name, each.name) for each in nested] or [(field.name,)]
    count = Counter(place[-1] for place in places)
    return {place[-1] if count[place[-1]] == 1 else ".".join(place): place for place in places}


def changed(config: _T, **values: Any) -> _T:
    """Return the config with fields replaced, by the names of `field_places`."""
    places, inner, own = field_places(config), dict[str, dict[str, Any]](), dict[str, Any]()
    for name, value in values.items():
        *outer, last = places[name]
        (inner.setdefault(outer[0], {}) if outer else own)[last] = value
    for name, new in inner.items():
        own[name] = replace(getattr(config, name), **new)
    return replace(config, **own)  # type: ignore[type-var]


def recorded(config: Any) -> dict[str, Any]:
    """Return every field's value by name, as config.json keeps them."""
    found = {}
    for name, place in field_places(config).items():
        value = reduce(getattr, place, config)
        found[name] = json.loads(json.dumps(value, default=partial(_for_json, name)))
    return found


def _for_json(name: str, value: Any) -> Any:
    """Return what JSON has instead of a value of a field; code is recorded by its name."""
    if isinstance(value, partial):
        return [value.func, *value.args, value.keywords]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if not callable(value):
        raise UserError(f"{name} is {value!r}, which JSON cannot hold; use text or a number")
    code = value if hasattr(value, "__qualname__") else type(value)
    return f"{code.__module__}.{code.__qualname__}"


def schedule_factor(settings: Settings, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """Return the factor at `step` (from 0) of `num_steps`; the warmup multiplies the schedule."""
    warmup, schedule = settings.warmup_steps, settings.schedule
    rising = (step + 1) / warmup if step < warmup else 1.0
    if schedule == "constant":
        return rising
    if isinstance(schedule, Milestones):
        at = schedule.steps or [epoch * steps_per_epoch for epoch in schedule.epochs]
        return rising * schedule.factor ** sum(step >= first for first in at)
    if callable(schedule):
        return rising * _checked_factor(schedule(step, num_steps), step, num_steps)
    done = min(max(0, step - warmup) / max(1, num_steps - 1 - warmup), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done
    low = settings.final_lr_fraction
    return rising * (low + (1 - low) * left)


def _checked_factor(factor: object, step: int, num_steps: int) -> float:
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise UserError(
            f"the schedule returned {factor!r} for step {step} of {num_steps}; "
            "return a finite number, at least 0"
        )
    return float(factor)
