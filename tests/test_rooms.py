"""What is measured of each room: its lines, and its door."""

import subprocess
from pathlib import Path

from tests.house import rooms, sources

FILES = {
    "training/durable/__init__.py": '"""The door."""\n\n__all__ = ["Head", "read_head"]\n',
    "training/durable/head.py": '"""One.\n\nTwo."""\n\n# Why.\nclass Head:\n    """A head."""\n\n'
    "    step = 1\n\n\ndef read_head(): ...\n",
    "training/run.py": "import training.durable.head\nfrom training.durable.head import Head\n",
    "sizing/plan.py": "def plan():\n    from training.durable.head import Head, read_head\n",
    "tests/training/durable/test_head.py": "1\n2\n",
    "tests/training/test_tally.py": "1\n",
    "tests/test_all.py": "1\n",
}


def test_a_checkout_is_measured_by_room(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [[*row.values()] for row in rooms(tmp_path, sources(tmp_path))] == [
        ["training/durable", 4, 2, 3, 2],
        ["sizing", 2, 0, 0, None],
        ["training", 2, 1, 0, None],
        ["all", 8, 4, 3, None],
    ]
