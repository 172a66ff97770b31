"""Recipes, overrides by name, and the record that a run belongs to."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import UserError
from tests.training.tiny import TINY
from training.cli.run import parse_prediction
from training.durable.record.run import RunConfig, ensure_run_config
from training.durable.store.folder import FolderStore, open_store
from training.registry import RECIPES, WORKLOADS, load_workload, parse_overrides, resolve_config
from training.settings import recorded
from training.workloads.detection.detection_workload import DETECTION


def test_overrides_take_the_field_s_type() -> None:
    overrides = parse_overrides(
        ["epochs=5", "learning_rate=1e-3", "clip_norm=none", "deterministic=false"]
    )
    config = resolve_config(TINY, "quick", overrides)
    assert (config.settings.epochs, config.settings.clip_norm) == (5, None)
    assert (config.learning_rate, config.deterministic) == (1e-3, False)
    assert config == resolve_config(TINY, "quick", {**overrides, "settings.epochs": "5"})
    assert config == resolve_config(TINY, "quick", {**overrides, "clip_norm": "null"})


def test_fails_for_an_override_that_every_stage_sets_itself() -> None:
    says = "schedule=linear has no effect: the stages of workload 'detection' set schedule"
    with pytest.raises(UserError, match=says):
        resolve_config(DETECTION, "laptop", {"schedule": "linear"})
    assert resolve_config(DETECTION, "laptop", {"sharding": "full"}).settings.sharding == "full"


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (["epoch=5"], "no field 'epoch'; did you mean 'epochs'. known are seed, num_threads"),
        (["epochs=many"], "epochs='many' is not a valid int . None; use another value"),
        (["epochs=41.6"], "'41.6' is not a valid int . None; use whole numbers, and no range"),
        (["learning_rate=nan"], "learning_rate='nan' is not a valid float; use another value"),
        (["learning_rate=inf"], "learning_rate='inf' is not a valid float; use another value"),
        (["deterministic=1"], "is not a valid bool"),
        (["epochs"], "write name=value"),
        (["epochs=1", "epochs=2"], "given twice"),
    ],
)
def test_fails_for_an_override_that_cannot_be(pairs: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        resolve_config(TINY, "quick", parse_overrides(pairs))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_recipes_that_are_known_without_torch_are_the_workload_s(name: str) -> None:
    assert list(RECIPES[name]) == sorted(load_workload(name).recipes)


def test_a_mistyped_recipe_is_answered_without_torch() -> None:
    """It takes seconds to import: here it cannot be."""
    act = (
        "import sys; sys.modules['torch'] = None; from training.cli.main import main; "
        "main('run --workload imagenet --recipe laptp --dataset-uri x --run-uri y'.split())"
    )
    done = subprocess.run([sys.executable, "-c", act], capture_output=True, text=True)
    assert done.stderr.startswith("error: workload 'imagenet' has no recipe 'laptp'; did you mean")


def record(**changes: object) -> RunConfig:
    mine = RunConfig(
        run_id="run-1",
        workload="tiny",
        recipe="quick",
        overrides={},
        config=recorded(resolve_config(TINY, "quick", {})),
        dataset="abc",
        bundle_uri=None,
        numerics_key={"torch": "2"},
        writer="i-1",
        created_at="2026-01-01T00:00:00Z",
    )
    return replace(mine, **changes)  # type: ignore[arg-type]


def test_the_first_record_is_the_truth(store_uri: str) -> None:
    store = open_store(store_uri)
    ensure_run_config(store, record(), frozenset())
    later = ensure_run_config(store, record(writer="i-2", numerics_key={"torch": "3"}), frozenset())
    assert later == record() == RunConfig.read(store)


def test_the_prediction_of_the_first_attempt_stays(store_uri: str) -> None:
    store = open_store(store_uri)
    first = record(prediction=parse_prediction("size=g5.xlarge hours_p50=0.25"))
    ensure_run_config(store, first, frozenset())
    ensure_run_config(store, record(prediction={"hours_p50": 9.0}), frozenset())
    found = RunConfig.read(store)
    assert found is not None
    assert found.prediction == {"size": "g5.xlarge", "hours_p50": 0.25}
    assert parse_prediction("") is None


def test_fails_on_a_prediction_that_is_none() -> None:
    with pytest.raises(UserError, match="the prediction 'soon' cannot be read"):
        parse_prediction("soon")
    for word in ("steps=nan", "usd_spot_per_hour=-1", "hours_p50=inf"):
        with pytest.raises(UserError, match=f"the prediction '{word}' is not a number"):
            parse_prediction(f"size=g5.xlarge {word}")


def test_placement_settings_may_change(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    ensure_run_config(store, record(), frozenset())
    changed = record(
        overrides={"step_seconds": "4", "loader_workers": "2"},
        config={**record().config, "step_seconds": 4.0, "loader_workers": 2},
    )
    assert ensure_run_config(store, changed, frozenset({"step_seconds"})) == record()


def test_a_run_that_began_before_the_settings_were_in_the_config_goes_on(tmp_path: Path) -> None:
    """Its record has the names that its config had, and an override as it was written then."""
    store = FolderStore(tmp_path)
    config = recorded(resolve_config(TINY, "quick", {"micro_batch": "2"}))
    # A setting, and a field of the workload's config: both came later.
    then = {n: value for n, value in config.items() if n not in ("reduction", "learning_rate")}
    then["find_unused_parameters"] = False  # which settings had, and have no longer
    began = record(overrides={"micro_batch": "2"}, config=then)
    ensure_run_config(store, began, frozenset())
    now = record(overrides={"settings.micro_batch": "2"}, config=config)
    assert ensure_run_config(store, now, frozenset()) == began
    other = record(overrides={"micro_batch": "2"}, config={**config, "eval_batch": 6})
    with pytest.raises(UserError, match="belongs to config field eval_batch 5, not 6"):
        ensure_run_config(store, other, frozenset())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"workload": "other"}, "belongs to workload 'tiny', not 'other'"),
        ({"recipe": "long"}, "belongs to recipe 'quick', not 'long'"),
        ({"overrides": {"epochs": "5"}}, r"belongs to overrides \(none\), not epochs=5"),
        ({"dataset": "xyz"}, "belongs to dataset 'abc', not 'xyz'"),
        ({"run_id": "run-2"}, "belongs to run id 'run-1', not 'run-2'"),
        ({"config": {"epochs": 9}}, "belongs to config field bad_start False, not None"),
    ],
)
def test_fails_for_a_run_folder_that_belongs_to_another(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    store = FolderStore(tmp_path)
    ensure_run_config(store, record(), frozenset())
    with pytest.raises(UserError, match=says):
        ensure_run_config(store, record(**changes), frozenset())


@pytest.mark.parametrize("name", ["imagenet", "detection"])
def test_a_refused_number_of_epochs_says_what_else_must_change(name: str) -> None:
    workload = load_workload(name)
    with pytest.raises(UserError, match="--override") as refused:
        resolve_config(workload, "laptop", {"epochs": "2"})
    named = dict(re.findall(r"--override (\w+)=(\w+)", str(refused.value)))
    assert resolve_config(workload, "laptop", {"epochs": "2", **named}).epochs == 2
