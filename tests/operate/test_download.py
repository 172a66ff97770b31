"""Names of files, which a script chose, on the laptop of who downloads them."""

from pathlib import Path

import pytest

from operate.download import _fetch
from operate.logs import as_line
from training.durable.errors import UserError
from training.durable.store.folder import FolderStore


def test_no_folder_is_made_outside(tmp_path: Path) -> None:
    store, out = FolderStore(tmp_path / "run"), tmp_path / "all/out"
    with pytest.raises(UserError, match="is not a key of"):
        _fetch(store, {"final/../../other/x": 1}, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_names_reach_no_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, name = FolderStore(tmp_path / "run"), "final/model/\x1b]0;P\x07.bin"
    store.put(name, b"1")
    _fetch(store, {name: 1}, tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == b"1"
    line = as_line({"machine": "i\x1b]0;x\x07", "text": "t", "time": "\x1b]0;t\x07"})
    assert "\x1b" not in capsys.readouterr().out + line
    line = as_line({"machine": "i-1", "text": "10%|# |\r99%|##|", "time": "2026-11-30T01:02:03Z"})
    assert line == f"2026-11-30 01:02:03Z {'i-1':<20} 99%|##|"


def test_where_a_folder_cannot_be_nothing_is_fetched(tmp_path: Path) -> None:
    store, out = FolderStore(tmp_path / "run"), tmp_path / "out"
    for name in ("final/a", "final/model/b"):
        store.put(name, b"1")
    (out / "final").mkdir(parents=True)
    (out / "final/model").touch()
    with pytest.raises(UserError, match="cannot write to"):
        _fetch(store, {"final/a": 1, "final/model/b": 1}, out)
    assert [path.name for path in (out / "final").iterdir()] == ["model"]
