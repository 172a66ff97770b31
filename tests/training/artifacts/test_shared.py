"""Runs share derived data: made once, never trusted, never needed, never another machine's bits."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.training.damage import flip
from tests.training.runs import WORKLOAD, Run
from tests.training.tiny import Doubled
from training.artifacts import prepare
from training.artifacts.prepare import _shared_key, _SharedArtifacts
from training.cli.main import main
from training.durable.store.folder import FolderStore, open_store

NUMERICS = {"torch": "2", "device": "cpu", "threads": 1, "deterministic": True, "world": 1}


def place(run_uri: str) -> str:
    """Beside the runs."""
    return f"{run_uri.rpartition('/')[0]}/artifacts"


def made_by_others(run: Run) -> list[bool]:
    return [line["shared"] for line in run.lines("prepare")]


def test_the_second_run_makes_nothing_and_equals_the_first(
    new_run: Callable[[str], Run], store_uri: str, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    option = f"--artifacts-uri={place(store_uri)}"
    first, second = new_run(store_uri), new_run(f"{store_uri}-b")
    assert first.attempt(option) == 0
    assert "3 shards, 0 of them reused, 0 made by other runs" in capsys.readouterr().out
    assert made_by_others(first) == [False] * 3
    assert second.attempt(option) == 0
    assert "3 shards, 0 of them reused, 3 made by other runs" in capsys.readouterr().out
    assert made_by_others(second) == [True] * 3
    assert first.head.weights_sha256 == second.head.weights_sha256 == whole.head.weights_sha256
    assert second.losses() == whole.losses()
    # Each keeps a copy, so that what is shared may go.
    open_store(place(store_uri)).delete_below("")
    assert len(second.store.sizes("artifacts/")) == 4


@pytest.mark.parametrize("damage", ["flipped bit", "cut", "gone"])
def test_what_does_not_hold_is_made_and_given_anew(
    new_run: Callable[[str], Run], tmp_path: Path, whole: Run, damage: str
) -> None:
    runs, option = tmp_path / "runs", f"--artifacts-uri={tmp_path / 'shared'}"
    assert new_run(str(runs / "a")).attempt(option) == 0
    (folder,) = (tmp_path / "shared").iterdir()
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(good) == 3
    (shard,) = folder.glob("00001-*")
    if damage == "flipped bit":
        flip(shard, -1)
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shard.unlink()
    second = new_run(str(runs / "b"))
    assert second.attempt(option) == 0
    assert [line["shard"] for line in second.lines("prepare") if not line["shared"]] == [1]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good
    assert second.head.weights_sha256 == whole.head.weights_sha256


def test_a_run_goes_on_alone_where_nothing_can_be_shared(
    run: Run, tmp_path: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shared").mkdir()
    key = shared_key_of_a_run(run, tmp_path)
    (tmp_path / "shared" / key).write_text("in the way")
    assert run.attempt(f"--artifacts-uri={tmp_path / 'shared'}") == 0
    said = capsys.readouterr().out
    assert said.count("this run makes its own shards from here on") == 1
    assert run.head.weights_sha256 == whole.head.weights_sha256


def shared_key_of_a_run(run: Run, tmp_path: Path) -> str:
    """The name under which a run shares its data: another one tells."""
    other = Run(dataset=run.dataset, uri=str(tmp_path / "other"), scratch=run.scratch)
    assert other.attempt(f"--artifacts-uri={tmp_path / 'there'}") == 0
    (folder,) = (tmp_path / "there").iterdir()
    return folder.name


def test_a_shard_that_vanishes_between_list_and_read_is_made(tmp_path: Path) -> None:
    class Vanishing(FolderStore):
        def sizes(self, prefix: str) -> dict[str, int]:
            return {f"{prefix}00000-{'a' * 64}.safetensors": 5}

    there = _SharedArtifacts(Vanishing(tmp_path / "shared"), Doubled(), "key", NUMERICS)
    assert there.fetch(0, tmp_path / "cache") is None
    assert not there.is_used


def test_another_machine_code_or_package_has_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**changes: Any) -> str:
        return _shared_key(Doubled(), "key", {**NUMERICS, **changes})

    assert key() == key(world=2), "a shard is made by one process"
    changes: list[Mapping[str, Any]] = [
        {"torch": "3"},
        {"device": "cuda"},
        {"threads": 2},
        {"deterministic": False},
        {"gpu": "NVIDIA A10G"},
        {"cpu_capability": "AVX2"},
    ]
    keys = {key(), _shared_key(Doubled(), "other", NUMERICS), *(key(**c) for c in changes)}
    monkeypatch.setattr(prepare, "_packages", lambda: ("torchvision==0",))
    keys.add(key())
    monkeypatch.setattr(prepare, "code_fingerprint", lambda *parts: "edited")
    keys.add(key())
    assert len(keys) == len(changes) + 4


def test_nothing_of_a_stage_that_does_not_say_so_is_shared(tmp_path: Path) -> None:
    silent = Doubled(is_shareable=False)
    assert not _SharedArtifacts(FolderStore(tmp_path), silent, "key", NUMERICS).is_used
    assert _SharedArtifacts(FolderStore(tmp_path), Doubled(), "key", NUMERICS).is_used


def sweep(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> list[Run]:
    """Two runs that differ in their learning rate, in the order of the table."""
    command = ["sweep", f"--workload={WORKLOAD}", "--recipe=quick", f"--dataset-uri={dataset}"]
    command += [f"--runs-uri={tmp_path / 'runs'}", f"--logs={tmp_path / 'logs'}", "--json"]
    assert main([*command, "--vary=learning_rate=0.01,0.02", *more]) == 0
    return [Run(dataset, row["uri"], tmp_path) for row in json.loads(capsys.readouterr().out)]


@pytest.mark.usefixtures("forked_sweep")
def test_a_sweep_derives_data_once(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = sweep(dataset, tmp_path, capsys)
    made = [[line["shared"] for line in one.lines("prepare")] for one in swept]
    assert made == [[False] * 3, [True] * 3]
    logs = sorted((tmp_path / "logs").glob("*.log"))
    assert "3 shards, 0 of them reused, 3 made by other runs" in logs[1].read_text()


@pytest.mark.usefixtures("forked_sweep")
def test_runs_of_a_sweep_at_once_take_what_the_other_has_made_or_make_it(
    dataset: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = sweep(dataset, tmp_path, capsys, "--parallel=2")
    assert [len(one.lines("prepare")) for one in swept] == [3, 3]
    assert run.attempt("--override=learning_rate=0.02") == 0
    assert run.losses() == swept[1].losses()
