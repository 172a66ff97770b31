"""An app's own folder that hides one of ours is named when ours are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "is_told"), [("training", True), ("stacks", True), ("mine", False)]
)
def test_a_folder_that_hides_one_of_ours_is_named(tmp_path: Path, name: str, is_told: bool) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", "import sizing"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    said = f"{tmp_path / name} hides {REPOSITORY / name} of the training stack; rename the"
    assert (said in done.stderr) == is_told
    assert is_told or not done.stderr
