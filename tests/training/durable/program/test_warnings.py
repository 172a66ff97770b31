"""What a loss would cost is said while there is time to do something about it."""

import pytest

from tests.training.durable.program.programs import ProgramRun
from training.durable.program.failure import hidden_failures


def test_a_program_that_writes_no_checkpoint_is_warned_of(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write("import time; time.sleep(0.6)")
    monkeypatch.setattr("training.durable.program.watch._NO_SNAPSHOT_SECONDS", 0.2)
    assert run.attempt("--usd-per-hour=3600") == 0
    (event,) = run.events("no-snapshot")
    assert "losing the machine costs all of it, 0." in event["message"]
    assert run.json("receipt.json")["warnings"] == [event["message"]]


@pytest.mark.parametrize(
    ("writes", "says"),
    [
        ("(folder / 'log.txt').write_text(str(number))", "'log.txt' keeps changing"),
        ("kept = kept or (folder / 'cache.db').open('w')", "'cache.db' stays open for writing"),
    ],
)
def test_a_folder_that_is_never_quiet_is_told_with_the_file_that_changes(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch, writes: str, says: str
) -> None:
    run.write(f"""
        import os, time
        from pathlib import Path
        folder, kept = Path(os.environ["SM_CHECKPOINT_DIR"]), None
        (folder / "model.pt").write_text("x")
        for number in range(30):
            {writes}
            time.sleep(0.1)
    """)
    monkeypatch.setattr("training.durable.program.watch._NEVER_QUIET_SECONDS", 1.0)
    for name in ("_GAP_SHARE", "_REWRITES"):  # else it is taken before that
        monkeypatch.setattr(f"training.durable.save.snapshots.watcher.{name}", 1000)
    assert run.attempt() == 0
    (event,) = run.events("no-snapshot")
    assert f"in {run.root / 'checkpoints'} {says}, and a snapshot needs 0.2 s" in event["message"]
    assert "after 2.4 s the program is stopped for a moment to take one" in event["message"]
    assert run.json("receipt.json")["warnings"] == [event["message"]]


@pytest.mark.parametrize("begins_at", [1, 39])
def test_a_program_that_does_not_read_what_it_was_given_is_told_of(
    run: ProgramRun, begins_at: int
) -> None:
    run.write(f"""
        import os, sys, time
        from pathlib import Path
        from training.program import commit
        state = Path(os.environ["SM_CHECKPOINT_DIR"], "state")
        if state.exists():
            print("step={begins_at} loss=1", flush=True)
            time.sleep(1)
            sys.exit(0)
        state.write_text("torn")
        print("step=40 loss=1", flush=True)
        time.sleep(1)
        commit()
        sys.exit(1)
    """)
    assert (run.attempt(), run.attempt()) == (1, 0)
    told = [event["step"] for event in run.events("started-over")]
    assert told == ([1] if begins_at == 1 else [])
    entry = run.head.checkpoints[-1]
    assert entry.program_step == 40
    warnings = run.json("receipt.json")["warnings"]
    assert [
        f"snapshot {entry.step}, of step 40, but begins at step 1" in one for one in warnings
    ] == ([True] if told else [])


def test_what_is_logged_at_step_0_by_one_that_has_resumed_is_no_new_start(run: ProgramRun) -> None:
    """As Lightning's hp_metric, by a TensorBoardLogger."""
    run.write("""
        import os, sys, time
        from pathlib import Path
        from training.program import commit
        state = Path(os.environ["SM_CHECKPOINT_DIR"], "state")
        step = int(state.read_text()) if state.exists() else 0
        for at in (0, step + 40):
            print(f"step={at} loss=1", flush=True)
            time.sleep(1)
        state.write_text(str(at))
        commit()
        sys.exit(step == 0)
    """)
    assert (run.attempt(), run.attempt()) == (1, 0)
    assert run.events("started-over") == []
    assert [entry.program_step for entry in run.head.checkpoints] == [40, 80]


@pytest.mark.parametrize("name", ["loss", "train_loss_step"])
def test_one_that_starts_over_is_told_of_whatever_its_metric_is_called(
    run: ProgramRun, name: str
) -> None:
    run.write(f"""
        import json, os, sys, time
        from pathlib import Path
        from training.program import commit
        state = Path(os.environ["SM_CHECKPOINT_DIR"], "state")
        had = state.exists()
        state.write_text("torn")
        for step in range(1, 31 if had else 41):
            with open(os.environ["SM_OUTPUT_DIR"] + "/metrics.jsonl", "a") as file:
                print(json.dumps({{"step": step, "{name}": 1.0}}), file=file)
            time.sleep(0.03)
        time.sleep(1)
        commit()
        sys.exit(not had)
    """)
    assert (run.attempt(), run.attempt()) == (1, 0)
    assert len(run.events("started-over")) == 1
    assert run.json("receipt.json")["steps_redone"] == 40


def test_what_is_logged_at_its_epoch_beside_steps_is_no_new_start(run: ProgramRun) -> None:
    """As `add_scalar("lr", rate, epoch)`, before the first of the epoch's losses by step."""
    run.write("""
        import os, sys, time
        from pathlib import Path
        from training.program import commit
        state = Path(os.environ["SM_CHECKPOINT_DIR"], "state")
        epoch = int(state.read_text()) if state.exists() else 0
        with open(os.environ["SM_OUTPUT_DIR"] + "/metrics.jsonl", "a") as file:
            print('{"step": %d, "lr": 1}' % epoch, file=file)
        time.sleep(1)
        for at in range(10):
            print(f"step={100 * epoch + 10 * at + 9} loss=1", flush=True)
            time.sleep(0.1)
        state.write_text(str(epoch + 1))
        commit()
        sys.exit(epoch < 3)
    """)
    assert [run.attempt() for _ in range(4)] == [1, 1, 1, 0]
    assert run.events("started-over") == []
    assert run.json("receipt.json")["steps_redone"] == 0


def test_one_that_ends_well_but_does_nothing_with_its_snapshot_is_told_of(run: ProgramRun) -> None:
    """OpenCLIP without `--resume latest` prints an error and exits with 0."""
    run.write("""
        import os, sys
        from pathlib import Path
        state = Path(os.environ["SM_CHECKPOINT_DIR"], "state")
        if state.exists():
            print("Error. Experiment already exists.")
            sys.exit(0)
        state.write_text("half")
        time = __import__("time").sleep(2)
        sys.exit(1)
    """)
    assert (run.attempt(), run.attempt()) == (1, 0)
    (event,) = run.events("nothing-done")
    assert "given snapshot 1, it ended with 0" in event["message"]
    assert run.json("receipt.json")["warnings"] == [event["message"]]


@pytest.mark.parametrize(
    ("command", "is_told"),
    [
        ("jupyter nbconvert --to notebook --execute train.ipynb", True),
        ("jupyter-execute train.ipynb", True),
        ("bash -c 'jupytext --to notebook --execute train.py'", True),
        ("papermill train.ipynb out.ipynb -p epochs 3", True),
        ("jupyter nbconvert --to script train.ipynb", False),
        ("python papermill.py", False),
    ],
)
def test_a_notebook_that_hides_a_failure_is_told_of(command: str, is_told: bool) -> None:
    told = hidden_failures(command)
    assert (told is not None) == is_told
    assert told is None or told[0] == "notebook"


@pytest.mark.parametrize(
    ("command", "is_told"),
    [
        ("bash -c 'python train.py | cat'", True),
        ("sh -xc 'python train.py 2>&1 | tee log.txt'", True),
        ("bash -eo pipefail -c 'python train.py | cat'", False),
        ("bash -c 'python train.py || exit 7'", False),
        ("/bin/bash -e -c 'python train.py |\n tee log.txt'", True),
        ("bash -c 'yes | python train.py'", False),
        ("bash -c 'python train.py | stdbuf -oL /usr/bin/tee log.txt'", True),
        ("bash -c 'echo a | cat > b && python train.py'", False),
        ("bash -c 'python train.py | tee log.txt; exit ${PIPESTATUS[0]}'", False),
    ],
)
def test_a_pipe_that_hides_a_failure_is_told_of(
    run: ProgramRun, command: str, is_told: bool
) -> None:
    run.write("raise ValueError")
    assert run.attempt(command=command) == (not is_told)
    assert ["pipefail" in event["message"] for event in run.events("pipe")] == [True] * is_told
