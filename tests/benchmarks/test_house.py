"""Rooms are measured alike today and in older checkouts: lines, doors, and what users type."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.house import room_of
from benchmarks.walks import row

FILES = {
    "training/durable/__init__.py": '"""The door."""\n\n__all__ = ["Head", "read_head"]\n',
    "training/record/head.py": '"""One.\n\nTwo."""\n\n# Why.\nclass Head:\n    """A head."""\n\n'
    "    step = 1\n\n\ndef read_head(): ...\n",
    "training/run.py": "import training.record.head\nfrom training.record.head import Head\n",
    "sizing/plan.py": "def plan():\n    from training.record.head import Head, read_head\n",
    "tests/training/record/test_head.py": "1\n2\n",
    "tests/training/test_tally.py": "1\n",
    "tests/test_all.py": "1\n",
    "tests/command_line.txt": "cdk -c size\ncdk -c train.x\nsizing plan\nsizing plan --size\n"
    "sizing plan --gpus\nsizing select --size\n",
}


def test_a_checkout_is_measured_by_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main(["house", f"--tree={tmp_path}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [[*row.values()] for row in found["rooms"]] == [
        ["training/durable", 4, 3, 3, 2],
        ["sizing", 2, 0, 0, None],
        ["training", 2, 0, 0, None],
        ["all", 8, 4, 3, None],
    ]
    assert [*found["figures"].values()] == [2, 0, 2, 2, 0]


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("cloudformation/lint.py", "embedded_aws"),
        ("tests/rehearsal/aws/test_roles.py", "embedded_aws"),
        ("rehearsal/faults.py", "embedded_aws"),
        ("rehearsal/demo/report.py", "rehearsal"),
        ("training/program/run.py", "training/durable"),
        ("training/program.py", "training"),
        ("tests/training/test_errors.py", "training/durable"),
        ("app.py", "the root"),
    ],
)
def test_a_folder_of_before_counts_as_the_room_that_it_became(path: str, room: str) -> None:
    assert room_of(path) == room


def test_this_checkout_has_a_row_for_each_room_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["house"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    for room in ("training", "training/workloads", "training/durable", "embedded_aws", "sizing"):
        assert f"\n {room} " in said


def test_fails_for_a_tree_that_is_no_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tree in (tmp_path, tmp_path / "none"):
        assert main(["house", f"--tree={tree}"]) == 2
        said = f"--tree is {tree}, not a git checkout; pass its folder\n"
        assert capsys.readouterr().err == said


def test_a_walk_tells_its_files_by_room() -> None:
    files = ("training/durable/record/head.py", "training/durable/save/save.py", "contract/keys.py")
    walked = row("save", {(file, name) for file in files for name in ("one", "two")})
    assert (walked["files"], walked["functions"]) == (3, 6)
    assert walked["by room"] == "training/durable 2, contract 1"
