"""A notice reaches each kind of program, and what it wrote until then is in the last snapshot."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from contract.notice import save_reserve
from tests.training.durable.program.programs import (
    COMMITS,
    ENDLESS,
    ProgramRun,
    is_running,
    kill,
    tell,
)
from tests.training.runs import wait_for
from training.durable.program.watch import ProgramWatch
from training.durable.save.snapshots.mirror import Mirror

SAVES_WHEN_TOLD = """
    import json, os, signal, sys, time
    from pathlib import Path
    state = Path(os.environ["SM_CHECKPOINT_DIR"], "state.json")
    step = json.loads(state.read_text())["step"] if state.exists() else 0
    def save(number, frame):
        notice = json.loads(Path(os.environ["TRAINING_NOTICE_FILE"]).read_text())
        state.write_text(json.dumps({"step": step, **notice}))
        sys.exit(EXIT)
    signal.signal(signal.SIGNAL, save)
    print(f"begins after {step}", flush=True)
    while step < 100_000:
        step += 1
        time.sleep(0.01)
"""
IGNORES = """
    import os, signal, time
    from pathlib import Path
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(os.environ["SM_CHECKPOINT_DIR"], "state.json").write_text("{}")
    print("begins", flush=True)
    time.sleep(1000)
"""


def begins(run: ProgramRun) -> bool:
    """Whether the program runs: its log arrives within seconds."""
    return any("begins" in run.log(generation) for generation in (1, 2))


def interrupted(run: ProgramRun, number: int = signal.SIGUSR1, *, is_saved: bool = False) -> str:
    """What an attempt prints that is told once its program is at work, or has been saved."""
    process = run.spawn()
    run.wait_for_snapshots(1) if is_saved else wait_for(lambda: begins(run))
    said = tell(process, number)
    assert process.returncode == 75
    return said


def test_a_program_that_saves_when_told_is_saved_at_once(run: ProgramRun) -> None:
    run.options = ["--notice-signal=SIGUSR1", "--notice-budget-seconds=60"]
    run.write(SAVES_WHEN_TOLD.replace("EXIT", "0").replace("SIGNAL", "SIGUSR1"))
    said = interrupted(run)
    assert "SIGUSR1 sent; the program has" in said
    (notice,) = run.events("notice")
    assert (notice["cause"], notice["signal"]) == ("notice", "SIGUSR1")
    assert 0 < notice["program_seconds"] < notice["seconds_left"] <= 60
    assert run.head.state == "released"
    # The program was told when the machine ends.
    state = json.loads((run.root / "checkpoints" / "state.json").read_text())
    assert state["step"] > 0
    assert 0 < state["seconds"] <= 60
    assert run.head.checkpoints[-1].kind == "emergency"
    (ended,) = run.events("program-ended")
    assert ended["exit_code"] == 0
    assert ended["unsaved_seconds"] < 3, "it left at once"


@pytest.mark.parametrize("commits", [0, 1])
def test_a_handler_that_exits_in_the_middle_of_a_save_leaves_the_whole_one_before(
    run: ProgramRun, commits: int
) -> None:
    run.options = ["--notice-budget-seconds=60", f"--hyperparameter=commits={commits}"]
    run.write("""
        import argparse, os, signal, sys, time
        from pathlib import Path
        from training.program import commit
        parser = argparse.ArgumentParser()
        parser.add_argument("--commits", type=int)
        state = Path(os.environ["SM_CHECKPOINT_DIR"], "state.txt")
        assert not state.exists() or state.read_text() == "whole", "failed locating file data.pkl"
        if state.exists():
            sys.exit(0)
        signal.signal(signal.SIGTERM, lambda *told: sys.exit(0))
        state.write_text("whole")
        if parser.parse_args().commits:
            commit()
        else:
            time.sleep(1.5)
        with state.open("w") as file:
            file.write("who")
            file.flush()
            print("begins to save", flush=True)
            time.sleep(1000)
    """)
    interrupted(run)
    assert run.attempt() == 0
    (resumed,) = run.events("resumed")
    assert resumed["passed_over"] == []


def test_what_a_notice_cuts_off_in_a_process_that_was_left_is_not_a_save(run: ProgramRun) -> None:
    run.options = ["--notice-budget-seconds=10", "--quiet-seconds=1.5"]
    run.write("""
        import os, subprocess, sys, time
        from pathlib import Path
        state = Path(os.environ["SM_CHECKPOINT_DIR"], "state.txt")
        if state.exists():
            sys.exit(state.read_text() != "whole")
        state.write_text("whole")
        time.sleep(4)
        save = "import time; f = open('FILE', 'w'); print('begins', flush=True); "
        save += "[(f.write('half'), f.flush(), time.sleep(0.1)) for _ in range(10000)]"
        words = [sys.executable, "-c", save.replace("FILE", str(state))]
        subprocess.Popen(words, start_new_session=True)
    """)
    said = interrupted(run)
    assert run.events("program-ended"), said
    assert run.attempt() == 0


def test_a_program_that_ignores_its_signal_is_ended_in_time(run: ProgramRun) -> None:
    run.options = ["--notice-budget-seconds=3", "--hyperparameter=mark=100048"]
    run.write(IGNORES)
    process = run.spawn()
    run.wait_for_snapshots(1)
    assert is_running("100048")
    said = tell(process)
    assert process.returncode == 75
    assert "out of time; stopping the program" in said
    (ended,) = run.events("program-ended")
    assert ended["exit_code"] == -9
    assert ended["unsaved_seconds"] > 0
    assert not is_running("100048")


@pytest.mark.parametrize(
    ("options", "why"), [(["--notice-signal=none"], "wants none"), ([], "does not handle SIGTERM")]
)
def test_a_program_that_cannot_be_told_goes_on_until_the_last_snapshot(
    run: ProgramRun, options: list[str], why: str
) -> None:
    run.options += [*options, "--notice-budget-seconds=4", *ENDLESS, COMMITS]
    said = interrupted(run, is_saved=True)
    assert f"no signal, as the program {why}" in said
    assert [event["signal"] for event in run.events("notice")] == ["none"]
    at_notice = max(line["step"] for line in run.history.lines if line["kind"] == "notice")
    assert max(run.history.steps["step"]) > at_notice


def test_a_handler_that_is_installed_after_the_notice_is_called(run: ProgramRun) -> None:
    run.options = ["--notice-budget-seconds=60"]
    late = "while not Path(os.environ['TRAINING_NOTICE_FILE']).exists(): time.sleep(0.1)"
    text = SAVES_WHEN_TOLD.replace("EXIT", "0").replace("SIGNAL", "SIGTERM")
    install = "signal.signal(signal.SIGTERM, save)"
    begins_first = 'print(f"begins after {step}", flush=True)'
    text = text.replace(begins_first, "").replace(
        install, f"{begins_first}\n    {late}\n    time.sleep(1.5)\n    {install}"
    )
    run.write(text)
    said = interrupted(run)
    assert "no signal, as the program does not handle SIGTERM" in said
    assert [event["signal"] for event in run.events("notice")] == ["none", "SIGTERM"]
    (ended,) = run.events("program-ended")
    assert (ended["exit_code"], ended["unsaved_seconds"] < 3) == (0, True)


def test_a_shutdown_waits_for_one_quiet_moment_only(run: ProgramRun) -> None:
    run.options += [*ENDLESS, COMMITS]
    interrupted(run, signal.SIGTERM, is_saved=True)
    (notice,) = run.events("notice")
    assert notice["cause"] == "shutdown"
    assert notice["program_seconds"] < 10 < notice["seconds_left"]


def test_a_rebalance_recommendation_asks_for_a_snapshot_and_ends_nothing(run: ProgramRun) -> None:
    run.write("""
        import os, time
        from pathlib import Path
        folder = Path(os.environ["SM_CHECKPOINT_DIR"])
        folder.joinpath("state").write_text("1")
        print("begins", flush=True)
        while not folder.joinpath("..", "model", "stop").exists():
            time.sleep(0.05)
    """)
    run.options = ["--quiet-seconds=3600"]
    process = run.spawn()
    wait_for(lambda: begins(run))
    process.send_signal(signal.SIGUSR2)
    run.wait_for_snapshots(1)
    assert run.head.checkpoints[-1].kind == "rebalance"
    (run.root / "model" / "stop").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_machine_that_waits_ends_the_rest_of_a_notice(run: ProgramRun) -> None:
    run.options += ["--notice-signal=none", "--notice-budget-seconds=100", "--lease-ttl-seconds=60"]
    run.options += [*ENDLESS, COMMITS]
    first = run.spawn()
    run.wait_for_snapshots(1)
    first.send_signal(signal.SIGUSR1)
    wait_for(lambda: bool(run.events("notice")))
    second = run.spawn(f"--ml-root={run.folder / 'other'}")
    said = first.communicate(timeout=60)[0]
    assert first.returncode == 75
    assert "another machine is waiting" in said
    wait_for(lambda: run.head.generation == 2)
    kill(second)


def test_a_program_that_exits_without_saving_is_said_to_lose_its_time(run: ProgramRun) -> None:
    run.options = ["--notice-budget-seconds=60"]
    run.write("""
        import os, signal, sys, time
        from pathlib import Path
        folder = Path(os.environ["SM_CHECKPOINT_DIR"])
        curves = folder.joinpath("events.out.tfevents.1.host").open("w")
        def leave(number, frame):
            curves.write("grown, as a log does")
            curves.close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        time.sleep(1)  # so it saves now and then: the log's growth alone is no state yet
        folder.joinpath("state").write_text("1")
        time.sleep(1000)
    """)
    process = run.spawn()
    run.wait_for_snapshots(1)
    time.sleep(0.3)
    tell(process)
    assert process.returncode == 75
    (ended,) = run.events("program-ended")
    assert (ended["exit_code"], ended["unsaved_seconds"] > 0.3) == (0, True)


def test_what_a_program_does_after_the_save_of_a_notice_is_said_to_be_lost(run: ProgramRun) -> None:
    """And one that then dies of its error is interrupted all the same."""
    run.options = ["--notice-budget-seconds=60"]
    save = 'state.write_text(json.dumps({"step": step, **notice}))'
    works_on = f"{save}; time.sleep(1.2)"
    run.write(
        SAVES_WHEN_TOLD.replace(save, works_on).replace("EXIT", "17").replace("SIGNAL", "SIGTERM")
    )
    said = interrupted(run)
    (ended,) = run.events("program-ended")
    assert ended["exit_code"] == 17
    assert 1.2 <= ended["unsaved_seconds"] < 5
    assert f"{ended['unsaved_seconds']:.1f} s since its last snapshot are lost" in said


def test_a_last_snapshot_that_does_not_fit_leaves_time_to_say_what_is_lost(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, final, times = ProgramWatch.begin, Mirror.final, list[float]()

    def told(self: ProgramWatch, process: Any) -> None:
        begin(self, process)
        interruption = self._run.supervisor.interruption
        interruption.record("shutdown")
        assert interruption.notice is not None
        times.append(interruption.notice.deadline)

    def noted(self: Mirror, **options: Any) -> bool:
        times.append(options["deadline"])
        return final(self, **options)

    monkeypatch.setattr(ProgramWatch, "begin", told)
    monkeypatch.setattr(Mirror, "final", noted)
    assert run.attempt(*ENDLESS, "--notice-budget-seconds=60") == 75
    assert times[0] - times[1] == pytest.approx(save_reserve(60))


def test_a_notice_file_that_cannot_be_written_keeps_no_program_from_its_signal(
    run: ProgramRun,
) -> None:
    """As on a full disk: the program was killed, and nothing of it saved."""
    run.options = ["--notice-budget-seconds=60"]
    script = SAVES_WHEN_TOLD.replace("EXIT", "0").replace("SIGNAL", "SIGTERM")
    of_notice = 'json.loads(Path(os.environ["TRAINING_NOTICE_FILE"]).read_text())'
    block = 'os.mkdir(os.environ["TRAINING_NOTICE_FILE"])\n    print(f"begins'
    run.write(script.replace(of_notice, "{}").replace('print(f"begins', block))
    interrupted(run)
    assert run.head.checkpoints[-1].kind == "emergency"


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_hears_of_a_notice_before_us_has_not_finished(
    run: ProgramRun, code: int
) -> None:
    """It asks EC2's metadata itself, saves and ends; the handler asks every two seconds."""
    done = run.folder / "done"
    run.write(f"""
        import os, sys
        from pathlib import Path
        Path(os.environ["SM_CHECKPOINT_DIR"], "state").write_text("half")
        Path("{done}").write_text(str(os.getpid()))
        sys.exit({code})
    """)
    process = run.spawn(f"--notice-file={run.folder / 'notice.json'}")
    wait_for(lambda: done.exists() and not Path("/proc", done.read_text() or "1").exists())
    said = tell(process)
    assert process.returncode == 75, said
    assert run.head.state == "released"
