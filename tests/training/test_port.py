"""docs/port.md: the script and the workload that it became, each checked as the page says."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.training import documented
from tests.training.forked import command
from training.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "port.md"


@pytest.mark.slow  # it trains five times
def test_both_checks_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for folder in (plain, tmp_path):  # the workload takes its model from the script
        shutil.copy(ROOT / "examples" / "plain" / "train.py", folder)
    ((name, content),) = documented.files(PAGE.read_text())
    (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    making = ["data", "make", "--workload=sequences:SEQUENCES", "--count=4096", "--out=data"]
    assert main(making) == 0
    program, workload = documented.read(PAGE)
    for example in (program, workload):
        code, out, err = command(example.arguments)
        said = f"{' '.join(example.arguments)}\n{err}{out}"
        assert code == example.code, said
        assert documented.matches(example.output, err + out), said


def test_the_page_s_table_names_what_the_script_has() -> None:
    script = (ROOT / "examples" / "plain" / "train.py").read_text()
    for part in ("class NextNumber(nn.Module)", "def parse_arguments", "torch.manual_seed(0)"):
        assert part in script
    for part in ("shuffle=True", "F.cross_entropy(", "torch.load(", "if os.path.exists("):
        assert part in script
