"""The scripts to kill: save habits with and without commit(), and public trainers."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.kills.lives import ANSWERS, Row
from benchmarks.kills.scripts.habits import HABITS

_RESTLESS = ("sqlite", "mapped")  # their files never stop changing
_SCRIPTS = Path(__file__).with_name("scripts")


def _habit(name: str, *, commits: bool) -> Row:
    return Row(
        name=f"{name}, commit()" if commits else name,
        files=[_SCRIPTS / "habits.py"],
        arguments=[name, *["--commit"] * commits],
        answers=ANSWERS,
        bound_seconds=120.0 if name in _RESTLESS and not commits else 10.0,
    )


def _trainer(name: str, *requirements: str, users_must: str = "") -> Row:
    return Row(
        name=name,
        files=[_SCRIPTS / f"train_{name}.py", _SCRIPTS / "told.py"],
        arguments=(),
        requirements=requirements,
        users_must=users_must,
    )


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
