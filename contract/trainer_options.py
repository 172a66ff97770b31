"""The options of `python -m training run` that a stack passes on, each written once.

This list defines the trainer's command line (--nan-skips 2), the stacks (-c train.nan_skips=2),
run.env and docs/parameters.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from contract.errors import UserError
from contract.grammar import (
    parse_count,
    parse_interval,
    parse_kept,
    parse_positive,
    parse_positive_count,
    parse_seconds,
)
from contract.notice import POLICIES
from contract.suggestion import suggest

# The numbers of ranks that divide a step evenly: the result does not depend on which one trains, so
# a fleet may mix sizes with these numbers of GPUs.
RANKS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerOption:
    """One option: `read` turns its text into a value, or raises a ValueError that says why not."""

    name: str
    form: str  # what may be written
    read: Callable[[str], object]
    default: str | None
    means: str
    bounds: tuple[float, float] | None = None  # for a stack's run; rehearsals may exceed them
    why_not_for_programs: str = ""


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise UserError(f"{text!r} is unknown; use {' or '.join(POLICIES)}")
    return text


_LIST = (
    TrainerOption(
        name="checkpoint_interval",
        form="auto|2epochs|100steps|600s",
        read=parse_interval,
        default="2epochs",
        means="how often to save",
        why_not_for_programs="a program decides when it saves",
    ),
    TrainerOption(
        name="keep",
        form="3|3,10epochs|3,5000steps",
        read=parse_kept,
        default="3",
        means="checkpoints to keep: the newest, and the first of every N epochs or steps; each "
        "stage's best and those still needed are kept too",
    ),
    TrainerOption(
        name="notice_policy",
        form="|".join(POLICIES),
        read=_policy,
        default="train-on",
        means="after the commit at a notice whose time is known: train on and commit once more as "
        "late as is safe, or stop",
    ),
    TrainerOption(
        name="lease_ttl_seconds",
        form="SECONDS",
        read=parse_positive,
        default="30",
        means="take over a lease that shows no heartbeat for this long",
        bounds=(2, 600),
    ),
    TrainerOption(
        name="nan_retries",
        form="N",
        read=parse_count,
        default="2",
        means="if training diverges: return to the last commit up to this many times without "
        "progress past the step, then fail the run",
        bounds=(0, 1000),
        why_not_for_programs="a program handles losses that diverge",
    ),
    TrainerOption(
        name="nan_skips",
        form="N",
        read=parse_count,
        default="0",
        means="and leave the step out on the retry, as every later attempt does too: at most N "
        "steps of the run",
        bounds=(0, 1000),
        why_not_for_programs="a program handles losses that diverge",
    ),
    TrainerOption(
        name="watchdog_seconds",
        form="SECONDS",
        read=parse_seconds,
        default="600",
        means="a trainer silent for this long prints its stacks and exits 1; 0: never",
    ),
    TrainerOption(
        name="profile",
        form="N",
        read=parse_positive_count,
        default=None,
        means="keep a torch.profiler trace of N steps after a warm-up in the run, under profiles/",
        why_not_for_programs="only a workload's steps can be profiled",
    ),
)
OPTIONS: Mapping[str, TrainerOption] = {option.name: option for option in _LIST}
# Hyperparameters of a SageMaker job that are options; every other one is a field of the recipe.
SAGEMAKER_OPTIONS = (
    *("workload", "recipe", "run-uri", "dataset-uri", "artifacts-uri", "init-from", "extend-to"),
    *("memory-limit-mib", "notice-budget-seconds", "num-processes", "usd-per-hour"),
    *(name.replace("_", "-") for name in OPTIONS),
)
# Usual names in training scripts, and the fields that they stand for.
_FIELDS: Mapping[str, str] = {
    "batch_size": "global_batch",
    "lr": "learning_rate",
    "lr_backbone": "backbone_learning_rate",
    "hidden_dim": "width",
    "num_workers": "loader_workers",
}


def recipe_field(hyperparameter: str, workload: str) -> str:
    """Return the field of the recipe that a hyperparameter sets: `batch-size` is `global_batch`.

    The user's own workload may have a field with such a name, so there each is what it says.
    """
    name = hyperparameter.replace("-", "_")
    return name if ":" in workload else _FIELDS.get(name, name)


def check_option(name: str, text: str) -> None:
    """Raise a UserError for a name or a value that no stack's run can have."""
    option = OPTIONS.get(name)
    if option is None:
        raise UserError(f"{name} is not a trainer option; {suggest(name, OPTIONS)}")
    try:
        value = option.read(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    if option.bounds and isinstance(value, int | float):
        least, most = option.bounds
        if not least <= value <= most:
            raise UserError(f"{name} is {text}; use {least:g} to {most:g}")


def read_words(text: str) -> dict[str, str]:
    """Read options as run.env has them, "a=b c=d", without checking them."""
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


def write_words(options: Mapping[str, str]) -> str:
    """Return the options as run.env has them, in the order of the list."""
    return " ".join(f"{name}={options[name]}" for name in OPTIONS if name in options)
