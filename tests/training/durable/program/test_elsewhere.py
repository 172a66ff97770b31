"""A script that saves where nothing is saved is told so, with the line to add, in its first minute.

Each of these writes twice a second for two seconds.
"""

from pathlib import Path

import pytest

from tests.training.durable.program.programs import ProgramRun

WRITES = """
    import os, sys, time
    from pathlib import Path
    def write(where):
        Path(where).parent.mkdir(parents=True, exist_ok=True)
        Path(where).write_text("x")
    for step in range(5):
        {writes}
        time.sleep(0.5)
"""
LINKED = "os.path.lexists('runs') or os.symlink('/tmp/out', 'runs'); write('/tmp/out/a')"
SAVE_TO = "let it save to $SM_CHECKPOINT_DIR or below its working folder"


@pytest.fixture(autouse=True)
def places(run: ProgramRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own, with files of others."""
    for name in ("home", "tmp", "mnt"):
        (run.folder / name / "others").mkdir(parents=True)
        (run.folder / name / "others" / "old").write_text("x")
    monkeypatch.setenv("HOME", str(run.folder / "home"))
    monkeypatch.setattr("training.durable.program.watch._ELSEWHERE_SECONDS", 0.5)
    return run.folder


@pytest.mark.parametrize(
    ("writes", "where", "how"),
    [
        ("write('outputs/2026-11-28/23-58-09/a')", "outputs", 'add "keep": ["outputs"]'),
        ("write('lightning_logs/version_0/a')", "lightning_logs", '"keep": ["lightning_logs"]'),
        ("write('checkpoint.pth.tar')", "checkpoint.pth.tar", '"keep": ["checkpoint.pth.tar"]'),
        ("write(f'ckpt_{step}.pt')", "ckpt_", '"keep": ["."]'),
        (LINKED, "runs", SAVE_TO),
        ("write(os.environ['SM_MODEL_DIR'] + '/a')", "/ml/model", SAVE_TO),
        ("write('/tmp/out/a')", "/tmp/out", SAVE_TO),
        ("write('/mnt/others/a')", "/mnt/others", SAVE_TO),
        ("write(os.environ['HOME'] + '/ray_results/a')", "/home/ray_results", SAVE_TO),
        ("write(Path('~/others/a').expanduser())", "/home/others", SAVE_TO),
    ],
)
def test_files_that_nothing_saves_are_an_event_with_the_line_to_add(
    run: ProgramRun, writes: str, where: str, how: str
) -> None:
    for place in ("'/tmp", "'/mnt"):
        writes = writes.replace(place, f"'{run.folder}{place[1:]}")
    run.write(WRITES.format(writes=writes))
    assert run.attempt() == 0
    (event,) = run.events("no-snapshot")
    found, _, rest = event["message"].partition(" but none in ")
    assert event["seconds"] < 2.5
    assert where in found.partition("new files are in ")[2]
    assert how in rest
    assert event["message"] in run.json("receipt.json")["warnings"]


@pytest.mark.parametrize(
    "writes",
    [
        "write(os.environ['SM_CHECKPOINT_DIR'] + '/a')",
        "write('__pycache__/a.pyc')",
        "write(os.environ['HOME'] + '/.cache/huggingface/a')",
        "write(os.environ['SM_CHANNEL_TRAINING'] + '/labels.cache')",
        "write(os.environ['HOME'] + '/oth' + 'ers/a')",
        "print(step)",
    ],
)
def test_what_is_saved_and_caches_and_files_of_others_are_not_elsewhere(
    run: ProgramRun, writes: str
) -> None:
    (run.folder / "data").mkdir()
    (run.folder / "data" / "one").write_text("x")
    run.write(WRITES.format(writes=writes))
    assert run.attempt(f"--dataset-uri={run.folder / 'data'}") == 0
    assert not [one for one in run.events("no-snapshot") if "if it saves there" in one["message"]]
