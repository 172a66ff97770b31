"""What a program's receipt says of what it left."""

import hashlib
import time
from pathlib import Path

import pytest

from tests.training.durable.program.programs import ProgramRun
from training.durable.program import process
from training.durable.program.log import ProgramLog


def test_without_a_model_the_receipt_has_the_checkpoint_folder_and_no_weights(
    run: ProgramRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """The checksum of no files looked like that of weights."""
    run.write("""
        import os
        from pathlib import Path
        folder = Path(os.environ["SM_CHECKPOINT_DIR"])
        (folder / "last.pt").write_bytes(b"last")
        Path(os.fsdecode(os.fsencode(folder) + b"/caf\\xe9")).write_bytes(b"x")
    """)
    assert run.attempt() == 0
    receipt = run.json("receipt.json")
    assert receipt["weights_sha256"] is run.head.weights_sha256 is None
    assert receipt["final_files"] == {}
    last = hashlib.sha256(b"last").hexdigest()
    assert receipt["checkpoint_files"].keys() == {"checkpoints/last.pt", "checkpoints/caf\\xe9"}
    assert receipt["checkpoint_files"]["checkpoints/last.pt"] == last
    assert "finished: no steps, weights none" in "".join(capfd.readouterr())


# Writes its model piece by piece, in a process that outlives the first.
_WRITER = """
    import os, sys, time
    with open(os.environ["SM_MODEL_DIR"] + "/model.bin", "wb") as model:
        for _ in range(PIECES):
            model.write(bytes(1000))
            model.flush()
            time.sleep(0.1)
    sys.exit(CODE)
"""


def _written(run: ProgramRun, pieces: int, code: int = 0) -> None:
    run.write(_WRITER.replace("PIECES", str(pieces)).replace("CODE", str(code)), "writer.py")
    run.write("nohup python writer.py > writer.log 2>&1 &", "run.sh")


@pytest.mark.parametrize("command", ["bash run.sh", "bash -c 'setsid python writer.py & exit 3'"])
def test_what_outlives_the_first_process_is_waited_for_while_it_writes(
    run: ProgramRun, command: str
) -> None:
    _written(run, pieces=25)
    assert run.attempt(command=command) == int("exit 3" in command)
    assert run.store.sizes("final/") == {"final/model/model.bin": 25_000}


def test_a_program_in_the_background_that_fails_has_not_finished(run: ProgramRun) -> None:
    _written(run, pieces=10, code=7)
    assert run.attempt(command="bash run.sh") == 1
    assert run.events("program-failed")[0]["exit_code"] == 7


def test_what_never_stops_writing_is_ended_and_named(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LEFT_SECONDS", 2.0)
    monkeypatch.setattr(process, "_BACKGROUND_SECONDS", 0.0)
    _written(run, pieces=10_000)
    assert run.attempt(command="bash run.sh") == 0
    assert "still wrote minutes after" in run.json("receipt.json")["warnings"][0]


_CRASHES = """
    import os, sys, time
    checkpoint = os.environ["SM_CHECKPOINT_DIR"] + "/last"
    if not os.path.exists(checkpoint):
        open(checkpoint + ".part", "w").write("last")
        os.replace(checkpoint + ".part", checkpoint)
        time.sleep(2)
    open(os.environ["SM_MODEL_DIR"] + "/model.bin", "w").write("model")
    END
"""


@pytest.mark.parametrize(
    ("end", "codes"),
    [("os.kill(os.getpid(), 11)", [1, 0]), ("os._exit(134)", [1, 0]), ("sys.exit(1)", [1, 1, 1])],
)
def test_a_crash_after_the_model_was_saved_is_an_end_once_nothing_is_left_to_do(
    run: ProgramRun, end: str, codes: list[int]
) -> None:
    run.write(_CRASHES.replace("END", end))
    assert [run.attempt() for _ in codes] == codes
    assert run.store.sizes("final/") == {"final/model/model.bin": 5}
    if not codes[-1]:
        assert "crashed at its exit" in run.json("receipt.json")["warnings"][0]


def test_a_crash_before_there_is_a_checkpoint_is_never_an_end(run: ProgramRun) -> None:
    crash = _CRASHES.replace("if not", "if 0 and not").replace("END", "os.kill(os.getpid(), 11)")
    run.write(crash)
    assert [run.attempt() for _ in range(3)] == [1, 1, 1]


def test_links_of_the_model_are_followed_or_named(run: ProgramRun, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("outside")
    run.write(f"""
        import os
        checkpoints, model = os.environ["SM_CHECKPOINT_DIR"], os.environ["SM_MODEL_DIR"]
        os.makedirs(checkpoints + "/step-9")
        open(checkpoints + "/step-9/weights", "w").write("weights")
        os.symlink(checkpoints + "/step-9", model + "/best")
        os.symlink(model, model + "/round")
        os.symlink("/nowhere", model + "/nothing")
        os.symlink("{outside}/folder", model + "/folder")
        os.symlink("{outside}/file", model + "/file")
    """)
    assert run.attempt() == 0
    assert run.store.sizes("final/") == {"final/model/best/weights": 7, "final/model/file": 7}
    (warning,) = run.json("receipt.json")["warnings"]
    for name in (
        "model/nothing (a link to /nowhere)",
        f"model/folder (a link to {outside}",
        "round",
    ):
        assert name in warning


@pytest.mark.parametrize(
    ("quiet", "lives", "closes"),
    [
        pytest.param(10, 4, 1.5, id="its death is no change"),
        pytest.param(5, 2, 4, id="nor is what follows a quiet time of what may be half a save"),
    ],
)
def test_a_save_that_was_over_counts_however_long_its_log_takes_to_close(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch, quiet: int, lives: int, closes: float
) -> None:
    close = ProgramLog.close
    monkeypatch.setattr(ProgramLog, "close", lambda *given: (time.sleep(closes), close(*given)))
    run.options = [f"--quiet-seconds={quiet}", f"--hyperparameter=lives={lives}"]
    run.write("""
        import os, sys, time
        from pathlib import Path
        Path(os.environ["SM_CHECKPOINT_DIR"], "state.txt").write_text("written")
        time.sleep(float(sys.argv[-1]))
        os.kill(os.getpid(), 9)
    """)
    assert run.attempt() == 1
    assert [entry.is_tentative for entry in run.head.checkpoints] == [True]


def test_what_a_failed_attempt_left_is_no_final_file(run: ProgramRun) -> None:
    """One torn shard of the model beside the whole one would be downloaded with it."""
    run.write(f"""
        import os, sys
        from pathlib import Path
        done = Path("{run.folder}", "done")
        name = "model" if done.exists() else "model-00001-of-00003"
        Path(os.environ["SM_MODEL_DIR"], name).write_bytes(b"weights")
        if not done.exists():
            done.touch()
            sys.exit(1)
    """)
    assert run.attempt() == 1
    assert run.store.sizes("final/").keys() == {"final/model/model-00001-of-00003"}
    assert run.attempt() == 0
    assert run.store.sizes("final/").keys() == {"final/model/model"}


def test_the_model_of_an_attempt_that_crashed_at_its_end_stays(run: ProgramRun) -> None:
    """The next one finds nothing left to train, and writes none."""
    run.write("""
        import os
        from pathlib import Path
        from training.program import commit
        done = Path(os.environ["SM_CHECKPOINT_DIR"], "done")
        Path(os.environ["SM_OUTPUT_DATA_DIR"], f"log-{done.exists()}").touch()
        if not done.exists():
            Path(os.environ["SM_MODEL_DIR"], "model").write_bytes(b"weights")
            done.touch()
            commit()
            os.abort()
    """)
    assert [run.attempt(), run.attempt()] == [1, 0]
    assert run.store.sizes("final/").keys() == {"final/model/model", "final/output/data/log-True"}
