"""A command empties the folder that it made, and nobody else's."""

from pathlib import Path

import pytest

from contract.cleared_folder import MARK, cleared_folder
from contract.errors import UserError


def test_what_the_last_command_left_is_gone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").touch()
    out = tmp_path / "out"
    with cleared_folder(out) as folder:
        (folder / "machines" / "i-1").mkdir(parents=True)
        (folder / "receipt.json").touch()
        (folder / "link").symlink_to(elsewhere)
    with cleared_folder(out) as folder:
        assert [path.name for path in folder.iterdir()] == [MARK]
    assert (elsewhere / "mine.txt").exists(), "a link is removed, not what it points at"


def test_fails_for_a_folder_with_files_of_others(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").touch()
    with pytest.raises(UserError, match="has files that this command did not make"):
        cleared_folder(tmp_path).__enter__()
    assert (tmp_path / ".git" / "HEAD").exists()
    assert not (tmp_path / MARK).exists(), "or the next try would delete them"


def test_fails_while_another_command_writes_to_it(tmp_path: Path) -> None:
    with cleared_folder(tmp_path) as folder:
        (folder / "receipt.json").touch()
        with pytest.raises(UserError, match="another command is writing to"):
            cleared_folder(tmp_path).__enter__()
        assert (folder / "receipt.json").exists()


def test_fails_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match=r"cannot write to .*out: File exists; choose another"):
        cleared_folder(tmp_path / "out").__enter__()
