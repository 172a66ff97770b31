"""A failure counts against a snapshot only if a traceback says that it was being read."""

import sys
from pathlib import Path

import pytest

from tests.training.durable.program.programs import ProgramRun
from training.cli.main import main
from training.durable.program.container import Container
from training.durable.program.failure import (
    MOST_FAILURES,
    blamed_place,
    failure_reason,
    failures_in_a_row,
    silent_end,
    why_given_up,
)

FILES = ["state.json", "checkpoint-5/model.pt", "latest"]
TRAIN = '  File "/opt/ml/code/train.py", line {}, in {}\n    {}\n'


def traceback(*frames: tuple[int, str, str], error: str) -> list[str]:
    text = "Traceback (most recent call last):\n"
    text += "".join(TRAIN.format(*frame) for frame in frames) + error
    return ["step=4", *text.splitlines()]


def place(lines: list[str], files: list[str] = FILES) -> str:
    return blamed_place(lines, files, Container(root=Path("/opt/ml")))


NAMED = "a file of it is named"
LOAD = (8, "<module>", "n = json.load(open(p))")
TORCH = (9, "<module>", "state = torch.load(path, map_location='cuda')")
HTTP = [
    "Traceback (most recent call last):",
    '  File "/venv/site-packages/requests/models.py", line 976, in json',
    "    return complexjson.loads(self.text, **kwargs)",
    "requests.exceptions.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
]
# As torchrun ends after one of its processes.
LAUNCHER = traceback(
    (901, "launch_agent", "raise ChildFailedError("), error="ChildFailedError: train.py FAILED"
)


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (traceback(LOAD, error="json.decoder.JSONDecodeError: Expecting value"), "train.py:8"),
        (traceback(TORCH, error="RuntimeError: PytorchStreamReader failed"), "train.py:9"),
        (traceback((5, "resume", "x = f['w']"), error="KeyError: 'w'"), "train.py:5"),
        (traceback(LOAD, error="ValueError: state.json is cut"), NAMED),
        (traceback((3, "<module>", "f = h5py.File(p)"), error="OSError: '/x/model.pt'"), NAMED),
        (traceback((3, "<module>", "f(p)"), error="OSError: '/opt/ml/checkpoints/latest'"), NAMED),
        (traceback((3, "<module>", "f(p)"), error="OSError: '/opt/ml/checkpoints/5/x'"), NAMED),
        (
            traceback((3, "<module>", 'assert os.path.exists(f"{d}/s")'), error="AssertionError"),
            "train.py:3",
        ),
        (traceback(TORCH, error="RuntimeError: Missing key(s): network.0.weight"), "train.py:9"),
        (traceback(TORCH, error="KeyError: 'cuda_rng_state'"), "train.py:9"),
        (
            [*("[rank1]: " + line for line in traceback(TORCH, error="EOFError")), *LAUNCHER],
            "train.py:9",
        ),
    ],
)
def test_what_fails_to_read_a_state_is_known_by_its_place(lines: list[str], where: str) -> None:
    assert place(lines) == where
    assert place(lines, []) == "", "the program has committed it"


@pytest.mark.parametrize(
    "lines",
    [
        ["ConnectionError: could not reach the tracking server"],
        ["state.json is cut", "Segmentation fault"],
        traceback((4, "<module>", "wandb.init()"), error="CommError: Run initialization failed"),
        traceback((4, "<module>", "load_dataset('x')"), error="ConnectionError: refused"),
        traceback(TORCH, error="RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        traceback(TORCH, error="torch.OutOfMemoryError: CUDA out of memory"),
        traceback(LOAD, error="OSError: [Errno 5] Input/output error: 'state.json'"),
        traceback((4, "save", "json.dump(s, f)"), error="OSError: [Errno 28] No space left"),
        traceback((4, "<module>", "for x in loader:"), error="RuntimeError: NaN"),
        traceback((4, "<module>", "SharedMemory(n, True)"), error="FileExistsError: '/psm'"),
        traceback((4, "<module>", "np.load(p)"), error="ValueError: /opt/ml/input/data/x.npy"),
        traceback((4, "<module>", "download(p)"), error="OSError: state.json.tmp"),
        traceback((4, "<module>", "train(x)"), error="RuntimeError: cuDNN error: CUDNN_STATUS"),
        traceback((4, "<module>", "save(s, 'a/model.pt')"), error="RuntimeError: Parent directory"),
        traceback((4, "<module>", "resume(s)"), error="RuntimeError: PytorchStreamWriter failed"),
        HTTP,
        [*traceback(LOAD, error="ValueError"), "and then", *traceback(error="KeyError: 'a'")],
    ],
)
def test_any_other_failure_says_nothing_of_the_snapshot(lines: list[str]) -> None:
    assert place(lines, [*FILES, "code/train.py"]) == ""


def test_a_service_that_is_down_costs_no_snapshot_and_a_torn_one_is_passed_over(
    run: ProgramRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.write("""
        import json, os, sys, time
        outage, head = sys.argv[1:]
        path = os.environ["SM_CHECKPOINT_DIR"] + "/state.json"
        if os.path.exists(outage):
            raise ConnectionError("the tracker cannot be reached")
        step = json.load(open(path))["step"] if os.path.exists(path) else 0
        print("begins after", step)
        while step < 3:
            step += 1
            with open(path, "w") as file:
                file.write('{"step": 3' if step == 3 else json.dumps({"step": step}))
            while len(json.load(open(head))["checkpoints"]) < step:
                time.sleep(0.1)
        raise RuntimeError("a fault of the GPU")
    """)
    outage = run.folder / "outage"
    command = f"python train.py {outage} {run.uri}/head.json"
    assert run.attempt(command=command) == 1
    assert [entry.step for entry in run.head.checkpoints] == [1, 2, 3]
    capfd.readouterr()
    outage.touch()
    for _ in range(2):
        assert run.attempt(command=command) == 1
    assert [entry.failed_starts for entry in run.head.checkpoints] == [0, 0, 0]
    back = f"python -m training reopen --from-checkpoint 2 --run-uri {run.store.uri}"
    assert capfd.readouterr().err.splitlines()[-1].endswith(f"if its files are, go back: {back}")
    outage.unlink()
    for _ in range(2):
        assert run.attempt(command=command) == 1
    assert [entry.failed_starts for entry in run.head.checkpoints] == [0, 0, 2]
    assert run.attempt(command=command) == 1
    assert run.log(6).splitlines()[0] == "begins after 2"
    assert main(["reopen", f"--run-uri={run.uri}", "--from-checkpoint=3"]) == 0
    assert [entry.failed_starts for entry in run.head.checkpoints] == [0, 0, 0]


@pytest.mark.parametrize(
    ("lines", "exit_code", "end"),
    [
        pytest.param(["loading", "train: the file is damaged"], 1, "exit code 1", id="its words"),
        pytest.param([], -11, "exit code -11", id="a crash in a library"),
        pytest.param([], -9, "", id="memory"),
        pytest.param(["run.sh: line 1: 7 Killed"], 137, "", id="memory of a shell's child"),
        pytest.param(["ConnectionError: could not reach the server"], 1, "", id="an outage"),
        pytest.param(["Traceback (most recent call last):", "KeyError: 1"], 1, "", id="its place"),
    ],
)
def test_an_end_without_a_word_of_why_is_told_from_others(
    lines: list[str], exit_code: int, end: str
) -> None:
    assert silent_end(lines, exit_code) == end


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param(
            f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 train.py",
            "ValueError: the data are gone",
            id="torchrun",
        ),
        pytest.param(
            "accelerate launch --num_processes=1 --num_machines=1 --mixed_precision=no "
            "--dynamo_backend=no train.py --cpu",
            "ValueError: the data are gone",
            id="accelerate",
            marks=pytest.mark.slow,
        ),
        pytest.param("bash -c 'echo no luck; exit 1'", "exit code 1: no luck", id="no traceback"),
    ],
)
def test_the_reason_is_the_program_s_own_error_behind_a_launcher(
    run: ProgramRun, command: str, reason: str
) -> None:
    run.write("raise ValueError('the data are gone')")
    assert run.attempt(command=command) == 1
    assert reason in run.events("program-failed")[0]["message"]


Life = tuple[int, float]  # the furthest step that is known, or -1, and how many seconds it took


@pytest.mark.parametrize(
    ("lives", "times", "why"),
    [
        pytest.param([(7, 3e4), (7, 60.0), (5, 60.0)], 3, "", id="a step of which it never gets"),
        pytest.param([(7, 60.0), (8, 60.0)], 1, "", id="further"),
        pytest.param([(-1, 3e4)] * 40, 0, "", id="no steps, and it works for hours"),
        pytest.param([(-1, 60.0)] * 14, 14, "", id="no steps, and it fails soon"),
        pytest.param([(-1, 60.0)] * 14 + [(-1, 3e4)], 0, "", id="until it works for hours"),
        pytest.param([(299, 9e3)] + [(-1, 50.0)] * 13, 14, "", id="silent lives (seed 86475)"),
        pytest.param([(9, 60.0)] * 15, 15, "15 times in a row, never after step 9", id="enough"),
        pytest.param([(-1, 60.0)] * 15, 15, "in a row, each in 15 minutes", id="silent, enough"),
        pytest.param([(9, 60.0)] * 16, 1, "", id="reopened"),
        pytest.param([(0, 3e4)] * 15, 15, "in a row, never after step 0", id="never beyond one"),
        pytest.param([(9, 9e3)] + [(-1, 3e4)] * 14, 0, "", id="no steps any more, for hours"),
    ],
)
def test_failures_in_a_row_are_counted(lives: list[Life], times: int, why: str) -> None:
    series = dict[str, int]()
    for number, (step, seconds) in enumerate(lives):
        before = {**series, "snapshot": number}
        series = failures_in_a_row(before, number, step, seconds, has_committed=True)
    assert series.get("times", 0) == times
    assert why in why_given_up(series)
    assert bool(why_given_up(series)) == (times == MOST_FAILURES)


def test_one_that_committed_nothing_is_the_guard_s_to_count() -> None:
    before = {"furthest_step": 7, "times": 3}
    assert failures_in_a_row(before, 0, 7, 60.0, has_committed=False) == before


def test_what_has_committed_between_two_failures_of_silent_programs_is_no_row() -> None:
    before = {"furthest_step": -1, "times": 14, "snapshot": 7}
    assert failures_in_a_row(before, 7, -1, 60.0, has_committed=True)["times"] == 15
    assert failures_in_a_row(before, 9, -1, 60.0, has_committed=True) == {}


def test_an_error_that_the_program_survived_is_not_its_reason(tmp_path: Path) -> None:
    lines = traceback(LOAD, error="ConnectionError: tracker is away")
    tail = [*lines, "step 10", "FATAL: loss is nan, stopping"]
    container = Container(root=tmp_path)
    said = "the program ended with exit code 1: FATAL: loss is nan, stopping"
    assert failure_reason(container, 1, tail) == said
    assert failure_reason(container, 1, [*lines, *LAUNCHER]).endswith("tracker is away")
