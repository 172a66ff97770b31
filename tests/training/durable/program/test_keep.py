"""A script that saves where it likes: what program.json keeps outlives the machine, too."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.program import Program
from tests.training.durable.program.programs import ProgramRun
from training.cli.main import main

# Counts to 6 in STATE; its first life fails at 4.
COUNTER = """
    import json, os, shutil, sys, time
    from pathlib import Path
    state = Path(sys.argv[1])
    {begins}
    state.parent.mkdir(parents=True, exist_ok=True)
    first = step = json.loads(state.read_text()) if state.exists() else 0
    print(f"begins after {{step}}")
    while step < 6:
        step += 1
        part = state.with_suffix(".part")
        part.write_text(str(step))
        part.replace(state)
        if step == 4 and not first:
            time.sleep(1.5)
            sys.exit(1)
"""


def attempt(run: ProgramRun, root: str, state: str, keep: Sequence[str]) -> int:
    """Run an attempt on a machine of its own."""
    program = {"command": f"python train.py {state}", "keep": keep, "quiet_seconds": 0.2}
    (run.folder / "program.json").write_text(json.dumps(program))
    here = replace(run, folder=run.folder / root)
    words = [one for one in here.arguments() if "--program=" not in one and "--quiet" not in one]
    words = [one for one in words if "--source=" not in one and "--metric=" not in one]
    more = [f"--program-file={run.folder / 'program.json'}", f"--source={run.source}"]
    return main([*words, *more])


@pytest.mark.parametrize(
    ("state", "keep", "begins"),
    [
        ("outputs/state.json", ["outputs"], ""),
        ("state.json", ["state.json"], ""),
        ("./state.json", ["./"], ""),
        ("outputs/2026-11-28/models/state.json", ["missing", "outputs", "outputs/2026-11-28/"], ""),
        (
            "runs/a/state.json",
            ["runs/a"],
            "Path('runs').exists() or os.symlink('there', 'runs')",
        ),
        (
            "outputs/state.json",
            ["outputs"],
            "os.path.exists('outputs/gone') and shutil.rmtree('outputs/gone')",
        ),
    ],
)
def test_what_is_kept_outlives_its_machine(
    run_anywhere: ProgramRun, tmp_path: Path, state: str, keep: list[str], begins: str
) -> None:
    run = run_anywhere
    run.write(COUNTER.format(begins=begins))
    run.write("a file of the source", "outputs/gone/README")
    run.write("one more", "there/README")
    assert [attempt(run, root, state, keep) for root in ("one", "two")] == [1, 0]
    assert [run.log(number).split()[-1] for number in (1, 2)] == ["0", "4"]
    assert main(["export", f"--run-uri={run.uri}", f"--out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "@working_folder" / state).read_text() == "6"


def test_links_within_what_is_kept_follow_it_to_the_next_machine(run: ProgramRun) -> None:
    run.write(
        COUNTER.format(
            begins="latest = Path('outputs/latest'); print(latest.resolve(latest.is_symlink()))"
        )
        + "        latest.unlink(missing_ok=True); latest.symlink_to(state.resolve())\n"
    )
    codes = [attempt(run, root, "outputs/state.json", ["outputs"]) for root in ("one", "two")]
    assert codes == [1, 0]
    assert f"{run.folder}/two/ml/code/outputs/state.json" in run.log(2)
    assert (
        f"now point into {run.folder}/two/ml/code" in run.events("restored-otherwise")[0]["message"]
    )


@pytest.mark.parametrize(
    "path", ["", "/tmp/outputs", "../outputs", "a/../..", "~/out", "$HOME/out"]
)
def test_fails_to_keep_what_is_not_below_the_working_folder(path: str) -> None:
    with pytest.raises(UserError, match="is not within the working folder; give a relative path"):
        Program.from_json(json.dumps({"command": "python train.py", "keep": [path]}))
