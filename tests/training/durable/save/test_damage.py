"""Damage in a store is named and bypassed; nothing else of the run is lost."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.damage import flip, make_readable, make_unreadable
from tests.training.hooks import interrupt_at
from tests.training.runs import Run, assert_equal
from training.artifacts.prepare import _indexed
from training.durable.record.head import CheckpointEntry
from training.durable.store.folder import FolderStore


def file_of(run: Run, entry: CheckpointEntry, name: str) -> Path:
    return Path(run.uri) / "checkpoints" / entry.name / name


def snapshot_of(run: Run) -> dict[str, bytes]:
    root = Path(run.uri)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def interrupted(run: Run, stage: str, step: int) -> None:
    interrupt_at(stage, step)
    assert run.attempt() == 75


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", "does not match its checksum"),
        ("optimizer.safetensors", "is missing"),
        ("state.json", "does not match its checksum"),
        ("state.json", "is missing"),
        ("", "Too many levels of symbolic links"),
        ("model.safetensors", "Too many levels of symbolic links"),
    ],
)
def test_damage_to_any_file_of_a_checkpoint_costs_the_steps_since_the_one_before(
    run: Run, whole: Run, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    interrupted(run, "second", 7)
    newest, older = run.head.checkpoints[-1], run.head.checkpoints[-2]
    path = file_of(run, newest, name)
    if damage == "is missing":
        path.unlink()
    else:
        flip(path, -1) if "match" in damage else make_unreadable(path)
    capsys.readouterr()
    assert run.attempt() == 0
    resumed = run.events("resumed")[-1]
    ((passed, why),) = (one.values() for one in resumed["passed_over"])
    assert passed == newest.name and name in why and damage in why
    assert f"passed over checkpoint {newest.name}: {why}" in capsys.readouterr().out
    assert resumed["checkpoint"] == older.name
    assert_equal(run, whole)


def test_a_damaged_stage_end_falls_back_to_an_older_state_of_its_stage(
    run: Run, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(run, "second", 1)
    before, end, after = run.head.checkpoints[-3:]
    assert (before.stage, end.kind, after.stage) == ("first", "stage-end", "second")
    flip(file_of(run, end, "model.safetensors"), -1)
    assert run.attempt() == 0
    resumed = run.events("resumed")[-1]
    assert resumed["checkpoint"] == before.name
    passed_over = {entry["name"]: entry["why"] for entry in resumed["passed_over"]}
    assert set(passed_over) == {end.name, after.name}
    assert "model.safetensors does not match its checksum" in passed_over[end.name]
    assert passed_over[after.name].startswith("the end of stage 'first'")
    assert passed_over[after.name].endswith("and its stage started from there")
    assert_equal(run, whole)


def test_a_damaged_stage_end_with_nothing_before_it_ends_the_attempt_and_begins_nothing_anew(
    run: Run, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(run, "second", 10)
    end = run.head.checkpoints[0]
    assert end.kind == "stage-end"
    state = file_of(run, end, "state.json")
    moved = state.rename(state.with_suffix(".moved"))
    before = run.head.checkpoints
    capsys.readouterr()
    assert run.attempt() == 4
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith(f"error: none of the 4 checkpoints of {run.uri} can be used on this")
    assert (run.head.state, run.head.checkpoints) == ("released", before)
    moved.rename(state)
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_a_machine_that_reads_every_checkpoint_wrong_deletes_none(
    run: Run, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(run, "second", 10)
    read, before = FolderStore.read_into, snapshot_of(run)

    def read_badly(self: FolderStore, key: str, start: int, data: memoryview) -> None:
        read(self, key, start, data)
        data[0] ^= "model.safetensors" in key

    with monkeypatch.context() as bad_memory:
        bad_memory.setattr(FolderStore, "read_into", read_badly)
        assert run.attempt() == 4
    after = snapshot_of(run)
    assert {name for name in before if name.startswith("checkpoints/")} <= after.keys()
    steps = len(run.lines("step"))
    assert run.attempt() == 0
    assert (
        len(run.lines("step")) - steps
        == 24 - json.loads(before["head.json"])["checkpoints"][-1]["step"]
    )
    assert_equal(run, whole)


def test_fails_where_no_checkpoint_can_be_read_and_never_begins_anew(
    run: Run, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(run, "second", 7)
    entries = run.head.checkpoints
    model = file_of(run, entries[-1], "model.safetensors")
    flip(model, -1)
    unreadable = [file_of(run, entry, "") for entry in entries[:-1]]
    for folder in unreadable:
        make_unreadable(folder)
    capsys.readouterr()
    assert run.attempt() == 74
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith(f"error: no checkpoint of {run.uri} can be read: ")
    assert (run.head.state, run.head.checkpoints) == ("released", entries)
    for folder in unreadable:
        make_readable(folder)
    flip(model, -1)
    steps = len(run.lines("step"))
    assert run.attempt() == 0
    assert len(run.lines("step")) - steps == 24 - entries[-1].step, "no step was repeated"
    assert_equal(run, whole)


def test_what_was_damaged_on_its_way_is_read_again(
    run: Run, whole: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(run, "second", 7)
    read, count = FolderStore.read_into, 0

    def read_badly(self: FolderStore, key: str, start: int, data: memoryview) -> None:
        nonlocal count
        read(self, key, start, data)
        if "state.json" in key:
            count += 1
            data[0] ^= count == 1

    monkeypatch.setattr(FolderStore, "read_into", read_badly)
    assert run.attempt() == 0
    assert "state.json does not match its checksum; reading it again" in capsys.readouterr().out
    assert run.events("resumed")[-1]["passed_over"] == []
    assert_equal(run, whole)


@pytest.mark.parametrize(
    ("name", "cut"), [("head.json", 0), ("head.json", -3), ("config.json", 0), ("config.json", 40)]
)
def test_fails_for_a_torn_json_in_one_sentence_and_goes_on_once_it_is_put_back(
    run: Run, whole: Run, capsys: pytest.CaptureFixture[str], name: str, cut: int
) -> None:
    interrupted(run, "first", 4)
    path = Path(run.uri) / name
    good = path.read_bytes()
    path.write_bytes(good[:cut])
    before = snapshot_of(run)
    capsys.readouterr()
    assert run.attempt() == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: {path} is damaged or was edited (")
    assert error.endswith("restore its last good version, the checkpoints are unaffected")
    assert len(error.splitlines()) == 1
    assert snapshot_of(run) == before
    path.write_bytes(good)
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_fails_without_a_head_where_checkpoints_are_and_sweeps_nothing(
    run: Run, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(run, "first", 4)
    path = Path(run.uri) / "head.json"
    good = path.read_bytes()
    path.unlink()
    before = snapshot_of(run)
    assert run.attempt() == 2
    assert "has checkpoints but no head.json; restore its last version" in capsys.readouterr().err
    assert snapshot_of(run) == before
    path.write_bytes(good)
    assert run.attempt() == 0
    assert_equal(run, whole)


def edit_head(run: Run, edit: Callable[[dict[str, object]], None]) -> None:
    path = Path(run.uri) / "head.json"
    record = json.loads(path.read_bytes())
    edit(record)
    path.write_text(json.dumps(record))


def test_a_head_of_the_older_format_is_gone_on_from(run: Run, whole: Run) -> None:
    interrupted(run, "second", 4)

    def to_format_1(record: dict[str, object]) -> None:
        record["format"] = 1
        for entry in record["checkpoints"]:  # type: ignore[attr-defined]
            del entry["is_best"]
            for file in entry["files"]:
                del file["part_bytes"]

    edit_head(run, to_format_1)
    assert run.attempt() == 0
    assert run.events("resumed")[-1]["passed_over"] == []
    assert json.loads((Path(run.uri) / "head.json").read_bytes())["format"] == 6
    assert_equal(run, whole)


def test_fails_for_a_newer_format_and_says_which_bundle_reads_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(run, "first", 4)
    edit_head(run, lambda record: record.update(format=99))
    before = snapshot_of(run)
    assert run.attempt() == 2
    assert (
        "head.json has format 99, but this version knows 1 to 6; "
        "run the bundle that config.json names"
    ) in capsys.readouterr().err
    assert snapshot_of(run) == before


SHARD = {"name": f"00000-{'ab' * 32}.safetensors", "sha256": "ab" * 32, "bytes": 1}


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [{}],
        ["x"],
        3,
        [{**SHARD, "name": "../../../x"}],
        [{**SHARD, "name": f"00001-{'ab' * 32}.safetensors"}],
        [{**SHARD, "sha256": "cd" * 32}],
        [SHARD, SHARD],
    ],
    ids=str,
)
def test_an_index_that_lists_what_is_no_shard_counts_for_nothing(
    tmp_path: Path, shards: object
) -> None:
    store = FolderStore(tmp_path)
    store.put("artifacts/a/index.json", json.dumps({"shards": [SHARD]}).encode())
    assert _indexed(store, "artifacts/a/", 1) == [SHARD]
    store.put("artifacts/a/index.json", json.dumps({"shards": shards}).encode())
    assert _indexed(store, "artifacts/a/", 1) is None


@pytest.mark.parametrize(
    "damage", ["flipped bit", "missing shard", "short index", "torn index", "no index"]
)
def test_a_damaged_artifact_is_made_anew_and_nothing_else(
    run: Run, whole: Run, damage: str
) -> None:
    interrupted(run, "second", 4)
    (folder,) = (Path(run.uri) / "artifacts").iterdir()
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    index, shard = folder / "index.json", sorted(folder.glob("00001-*"))[0]
    if damage == "flipped bit":
        flip(shard, -1)
    elif damage == "short index":
        record = json.loads(good["index.json"])
        index.write_text(json.dumps({**record, "shards": record["shards"][:1]}))
    elif damage == "torn index":
        index.write_bytes(good["index.json"][:50])
    else:
        (shard if "shard" in damage else index).unlink()
    checkpoint = run.head.checkpoints[-1].name
    assert run.attempt() == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good
    made = [line["shard"] for line in run.lines("prepare") if line["generation"] == 2]
    assert made == ([1] if "shard" in damage or "bit" in damage else [])
    assert run.events("resumed")[-1]["checkpoint"] == checkpoint, "no step was lost"
    assert_equal(run, whole)
