"""A sweep as a file that is written once: its runs by name, and how they were drawn.

It is stored next to the runs; this machine, or a queue of SageMaker jobs, trains them.
"""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from contract.errors import UserError

_FORMAT = 1
# Tries per run, because a combination that was already drawn is drawn again.
_TRIES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRun:
    """One run: its name, and its overrides as NAME=VALUE."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The runs of one workload's recipe."""

    workload: str
    recipe: str
    drawn: str  # "grid", or how many with which seed
    runs: tuple[SweepRun, ...]

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Sweep":
        """Read the file; UserError if it is not a sweep."""
        try:
            record = json.loads(data)
            if record.pop("format") != _FORMAT:
                raise ValueError("another format")
            runs = [SweepRun(name=r["name"], overrides=(*r["overrides"],)) for r in record["runs"]]
            return cls(**{**record, "runs": tuple(runs)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where} is not a sweep ({error}); write it with `sweep`") from error


def drawn_runs(
    vary: Sequence[str], overrides: Sequence[str], count: int | None, seed: int
) -> tuple[SweepRun, ...]:
    """Return all combinations of the values, or `count` drawn by the seed; UserError if invalid.

    A range such as 0.001..0.1 can only be drawn from; the draws are uniform in its logarithm.
    """
    axes = [_axis(text) for text in vary]
    if count is None:
        grid = [[(name, value) for value in _listed(name, values)] for name, values in axes]
        runs = tuple(_run(chosen, overrides) for chosen in itertools.product(*grid))
        names = [run.name for run in runs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"--vary {' '.join(vary)} makes the run {twice} twice; name it once")
        return runs
    rng = random.Random(seed)
    found: dict[str, SweepRun] = {}
    for _ in range(_TRIES * count):
        run = _run([(name, _draw(rng, name, values)) for name, values in axes], overrides)
        found.setdefault(run.name, run)
        if len(found) == count:
            return tuple(found.values())
    raise UserError(f"--random is {count}, but --vary has only about {len(found)} combinations")


def _axis(text: str) -> tuple[str, str]:
    name, separator, values = text.partition("=")
    if not separator or not all(values.split(",")):
        raise UserError(f"--vary {text!r} cannot be read; write name=value,value")
    return name, values


def _listed(name: str, values: str) -> list[str]:
    if ".." in values:
        raise UserError(f"--vary {name}={values} is a range; add --random N, or list its values")
    return values.split(",")


def _draw(rng: random.Random, name: str, values: str) -> str:
    if ".." not in values:
        return rng.choice(values.split(","))
    try:
        low, high = (math.log(float(end)) for end in values.split(".."))
        if not math.isfinite(high - low):
            raise ValueError
    except ValueError:
        raise UserError(
            f"--vary {name}={values} cannot be read; write two numbers above 0, as in 0.001..0.1"
        ) from None
    return f"{math.exp(rng.uniform(low, high)):.3g}"


def _run(chosen: Sequence[tuple[str, str]], overrides: Sequence[str]) -> SweepRun:
    own = [f"{name}={value}" for name, value in chosen]
    # A name is a single folder, next to those of the other runs.
    name = "_".join(f"{name}-{value}" for name, value in chosen).replace("/", "-")
    return SweepRun(name=name, overrides=(*overrides, *own))
