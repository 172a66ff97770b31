"""What `check --program` says of programs that resume exactly, nearly, or not at all."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from contract.certificate import certified
from contract.program import Program
from contract.source import CERTIFICATE
from training.cli.main import main
from training.proof.experiment import Difference, ProgramRun, difference, losses_by_step

_SCRIPT = """
import json, os, random, sys, time
folder, model = os.environ["SM_CHECKPOINT_DIR"], os.environ["SM_MODEL_DIR"]
path, state = os.path.join(folder, "state.json"), {"step": 0, "loss": 1.0}
rng = random.Random(SEED)
if os.path.exists(path):
    state = json.load(open(path))
    RESTORE
for step in range(state["step"], 12):
    state["loss"] *= 1 - 0.1 * rng.random()
    state["step"] = step + 1
    print(f"step {step + 1} loss={state['loss']:.6f}", flush=True)
    if step % 3 == 2:
        state["rng"] = rng.getstate()
        json.dump(state, open(path, "w"))
        commit = os.environ["TRAINING_COMMIT_FILE"]
        open(commit, "w").close()
        while os.path.exists(commit):
            time.sleep(0.01)
    time.sleep(0.05)
json.dump(state["loss"], open(os.path.join(model, "model.json"), "w"))
"""
_PROGRAM = Program(command="python train.py")
_EXACT = "v, i, g = state['rng']; rng.setstate((v, tuple(i), g))"


def _check(folder: Path, seed: str, restore: str, *more: str) -> int:
    folder.mkdir()
    (folder / "train.py").write_text(_SCRIPT.replace("SEED", seed).replace("RESTORE", restore))
    metrics = ["--metric", r"step=step (\d+)", "--metric", "loss=loss=([0-9.]+)"]
    program = ["--program", "python train.py", "--source", str(folder)]
    return main(["check", *program, *metrics, *more])


@pytest.mark.slow  # three runs more of what the next test has
def test_a_program_that_restores_all_of_its_state_is_equal_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(tmp_path / "source", "0", _EXACT, "--kills", "1") == 0
    said = capsys.readouterr().out
    assert "[ok] uninterrupted: 12 losses, " in said
    assert "[ok] once more: the same losses and final files" in said
    assert {"kill", "notice", "shutdown"} <= set(re.findall(r"  (\w+) of machine [0-9]+: ", said))
    assert re.search(r"  bits: +equal in 1 files; 12 losses equal, as printed\n", said)
    assert re.search(r"  habit: +it calls commit\(\), which is when a snapshot is taken\n", said)
    assert "[ok] certified: at most " in said
    assert certified(tmp_path / "source", _PROGRAM)["is"].startswith("certified on ")


@pytest.mark.slow
def test_a_program_that_loses_all_at_each_kill_fails_though_its_bits_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A database stays open for writing, so its folder is never snapshotted before the end."""
    (tmp_path / "train.py").write_text(
        "import os, sqlite3, time\n"
        "path = os.path.join(os.environ['SM_CHECKPOINT_DIR'], 'run.db')\n"
        "db = sqlite3.connect(path, isolation_level=None)\n"
        "db.execute('pragma journal_mode=wal')\n"
        "db.execute('create table if not exists s(step int)')\n"
        "done = db.execute('select max(step) from s').fetchone()[0] or 0\n"
        "for step in range(done + 1, 61):\n"
        "    time.sleep(0.1)\n"
        "    db.execute('insert into s values(?)', (step,))\n"
        "    print(f'iter {step}: loss {1 / step:.4f}, time 100ms', flush=True)\n"
    )
    given = ["--program=python train.py", f"--source={tmp_path}", "--quiet-seconds=20"]
    assert main(["check", *given]) == 1
    said = capsys.readouterr().out
    assert "[failed] not certified: an interruption costs all, as no snapshot was taken" in said
    assert re.search(r"  lost at most: +all since the start: no bound is known", said)
    assert re.search(r"  bits: +equal in [0-9]+ files", said)


@pytest.mark.slow
def test_a_program_that_forgets_a_random_state_ends_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(tmp_path / "source", "0", "pass", "--kills", "3", "--json") == 1
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert record["is_equal"] is False
    assert record["difference_of_two_uninterrupted"]["steps"] == []
    assert record["difference"]["files"] == ["model/model.json"]
    assert record["difference"]["steps"][0] > 3 and record["difference"]["largest"] > 0
    assert not record["certificate"]["is_good"]
    assert record["certificate"]["rows"]["bits"].startswith("differ (interrupted): ")


@pytest.mark.slow
def test_a_program_that_loads_the_wrong_one_of_its_files_is_not_certified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, ckpt_9 comes last: it goes back to step 9, and ends with equal bits."""
    (tmp_path / "train.py").write_text(
        "import glob, json, os, time\n"
        "folder = os.environ['SM_CHECKPOINT_DIR']\n"
        "found = sorted(glob.glob(f'{folder}/ckpt_*.json'))\n"
        "step = json.load(open(found[-1])) if found else 0\n"
        "print('starting', flush=True)\n"
        "while step < 99:\n"
        "    time.sleep(0.25)\n"
        "    step += 1\n"
        "    json.dump(step, open(f'{folder}/tmp', 'w'))\n"
        "    os.replace(f'{folder}/tmp', f'{folder}/ckpt_{step}.json')\n"
        "    print('saved', step, flush=True)\n"
    )
    given = ["--program=python train.py", f"--source={tmp_path}", "--quiet-seconds=0.5"]
    assert main(["check", *given, "--kills=1"]) == 1
    said = capsys.readouterr().out
    assert "[failed] not certified: it goes on from less than it has saved: " in said
    assert re.search(r"  bits: +equal in 99 files; it reports no losses\n", said)
    assert re.search(r"  lost at most: +all since the start: no bound is known", said)
    assert certified(tmp_path, _PROGRAM)["is"].startswith("tried, and not certified, on ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to check: name a workload, or pass --program and --source"),
        (["moons:MOONS", "--program=python train.py", "--source=."], "check one at a time"),
        (["--program=python train.py", "--source=nowhere"], "source folder nowhere does not exist"),
    ],
)
def test_fails_in_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_fails_with_the_program_s_own_words_where_it_cannot_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('no GPU today')\n")
    assert main(["check", "--program=python train.py", f"--source={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "failed without any interruption (exit code 1): " in said and "no GPU today" in said


def test_fails_where_a_program_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("print('step 1 loss=0.5')\n")
    assert main(["check", "--program=python train.py", f"--source={tmp_path}"]) == 2
    assert "so each interruption loses everything; save to $SM" in capsys.readouterr().err
    assert not (tmp_path / CERTIFICATE).exists()


def _run(losses: dict[int, float], **files: str) -> ProgramRun:
    return ProgramRun(losses=losses, files=files, interruptions=(), seconds=1, num_snapshots=1)


def test_every_kind_of_difference_is_found() -> None:
    nan = float("nan")
    whole = _run({1: 0.5, 2: nan, 3: 0.25}, a="x", b="y")
    assert difference(_run({1: 0.5, 2: nan, 3: 0.25}, a="x", b="y"), whole).is_none
    other = difference(_run({1: 0.5, 2: 0.5, 3: 0.5, 4: 1.0}, a="x", b="z", c=""), whole)
    found = Difference(steps=(2, 3), largest=0.25, files=("b", "c"))
    assert other == found and not found.is_none
    # The line of a step may be lost with its machine; what the step has computed is not.
    assert difference(_run({1: 0.5, 2: nan}, a="x", b="y"), whole).is_none
    # Without files, only the last step shows where a run has ended.
    assert difference(_run({1: 0.5}), _run({1: 0.5, 2: 0.25})).steps == (2,)


def test_a_step_s_loss_is_what_its_newest_attempt_said_of_it_first() -> None:
    def line(generation: int, at: int | None, **values: float | None) -> dict[str, Any]:
        return {"kind": "metrics", "generation": generation, "at": at, "values": values}

    lines = [
        line(2, 3, loss=0.25),
        line(1, 2, accuracy=0.5),  # read a moment before the loss of its step
        line(1, 2, loss=0.5),
        line(1, 3, loss=0.75),
        line(2, 3, train_loss=9.0),  # the mean of all, at the end
        line(2, 4, loss=None),
        line(2, None, loss=7.0),
        {"kind": "running", "generation": 2},
    ]
    losses = losses_by_step(lines)
    assert losses.pop(4) != losses.get(4) and losses == {2: 0.5, 3: 0.25}
