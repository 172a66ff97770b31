"""Lives that end before their program does."""

import random
import sys
from pathlib import Path

import pytest

from training.proof.check.lives import ExitKind, Lives

# It writes half of its file, says so, and then waits for its death.
TEARS = """
import json, os, pathlib, time
path = pathlib.Path(os.environ["SM_CHECKPOINT_DIR"], "state")
def say(**what): print(json.dumps({"at": time.time(), **what}), flush=True)
if path.exists() and path.read_text() != "whole":
    say(restored=None, torn="state")
    raise SystemExit(1)
say(restored=0)
say(step=1, ids=[1])
path.write_text("ha")
say(saving=1)
time.sleep(20 if "ANSWER" in os.environ else 0)
path.write_text("whole")
say(final="a")
"""


@pytest.mark.parametrize("how", ["kill", "notice"])
def test_a_torn_restore_on_a_local_disk_never_comes_back(tmp_path: Path, how: ExitKind) -> None:
    (tmp_path / "tears.py").write_text(TEARS)

    def lives(name: str) -> Lives:
        return Lives(folder=tmp_path / name, alone=[sys.executable, str(tmp_path / "tears.py")])

    assert lives("whole").uninterrupted().final == "a"
    found = lives("killed").killed(how, answers=["slow"], rng=random.Random(0), span=0.5)
    assert found.kills == 1 and found.final is None
    assert len(found.torn) == 4 and "killed/log-2 (slow): state" in found.torn[0]
    assert len(found.never_back) == 1


def test_what_a_process_made_again_as_it_died_is_not_the_next_machine_s(tmp_path: Path) -> None:
    lives = Lives(folder=tmp_path / "run", alone=["true"])
    (lives.machine / "ml").mkdir(parents=True)
    assert lives.live() == 0
    assert not lives.machine.exists()
