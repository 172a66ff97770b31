"""The rows of the table: save habits with and without commit(), and public trainers."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kills.programs.habits import HABITS

# How each row is played, in the page's words.
WAYS = {"alone": "alone", "folder": "ours, folder", "s3": "ours, S3"}
_RESTLESS = ("sqlite", "mapped")  # their files never stop changing


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A program of programs/: how it is started and killed, and in which environment."""

    name: str
    words: str  # its file and its arguments
    requirements: Sequence[str] = ()  # for its own environment; empty: use this one
    answers: Sequence[str] = ("its own",)  # to SIGTERM
    span_seconds: float = 4.0  # a kill comes within this time after a life's first step
    bound_seconds: float = 10.0  # the most lost work that a finished save had held
    users_must: str = ""  # what users must do for an exact resume


def _habit(name: str, *, commits: bool) -> Row:
    return Row(
        name=f"{name}, commit()" if commits else name,
        words=f"habits.py {name}{' --commit' * commits}",
        answers=("ignored", "exit 0", "exit 143", "works 200 s"),
        bound_seconds=120.0 if name in _RESTLESS and not commits else 10.0,
    )


def _trainer(name: str, *requirements: str, users_must: str = "") -> Row:
    words = f"train_{name}.py"
    return Row(name=name, words=words, requirements=requirements, users_must=users_must)


ROWS: Sequence[Row] = (
    _trainer(
        "nanogpt",
        "numpy",
        users_must="save and restore torch's random state too: it draws the batches, so otherwise "
        "a resume trains on different ones.",
    ),
    _trainer(
        "xgboost",
        "xgboost",
        users_must="leave out `subsample`: a resume draws different rows, even with "
        "`seed_per_iteration`; without it, the bits are equal.",
    ),
    _trainer("catboost", "catboost"),
    _trainer(
        "lightning",
        "lightning",
        users_must="save random states and the loader's position yourself (`on_save_checkpoint`, a "
        "loader with `state_dict`): its checkpoints have neither, so a resume inside an epoch "
        "trains on different samples. Not tested here with both.",
    ),
    _trainer(
        "huggingface",
        "transformers",
        "accelerate",
        users_must="on a local disk, delete a half-written `checkpoint-N` before resuming: "
        "`get_last_checkpoint` takes the newest folder, and every start fails on it.",
    ),
    _trainer("fastai", "fastai"),
    _trainer("ignite", "pytorch-ignite", "numpy"),
    _trainer("skorch", "skorch"),
    _trainer("accelerate", "accelerate"),
    _trainer(
        "keras",
        "keras",
        users_must="leave `save_freq` of `BackupAndRestore` at `epoch`: a resume inside an epoch "
        "trains on its first samples again. Not tested here with that.",
    ),
    _trainer("sb3", "stable-baselines3"),
    _trainer("ultralytics", "ultralytics"),
    _trainer("trl", "trl"),
    _trainer("sentence_transformers", "sentence-transformers", "datasets", "accelerate"),
    *(_habit(name, commits=commits) for commits in (False, True) for name in HABITS),
)
