"""Why a program has failed, and whether reading its snapshot is to blame. Imports no torch."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from training.durable.program.container import Container

_REASON_BYTES = 1024  # as SageMaker reads output/failure
_TRACEBACK = "Traceback (most recent call last)"
# Its file, line, function and code; torchrun prefixes lines with a rank.
_FRAME = re.compile(r'File "(.+?)", line (\d+), (in .*(?:\n(?:\[\w+\]:)? {4}.*)*)')
_LAST_LINES = 5
# As often as five machines start it: the Guard's bound, which a program that commits never meets.
MOST_FAILURES = 15
# A program that tells no steps has got no further, as far as anybody can see, if it fails so soon.
_SOON_SECONDS = 900.0
_PATH = re.compile(r"[\w./-]+\w")
# What reads a saved state: `torch.load`, `read`, `restore_from`; not `DataLoader`, `download`. And
# what is found then.
_READING = re.compile(
    r"(?<!down)(?<!up)load(?!er)|(?<![a-z])read(?!y)|restore|resum|pickl|exists\(|is_?file\(|h5py|"
    r"memmap|malformed|corrupt|\btorn\b",
    re.I,
)
# The machine's errors, or those of another one; not parameters such as `network.0.weight`.
_ELSEWHERE = re.compile(
    r"(connect|network|memory|cuda|cudnn|nccl|permission)(?!\w*[._]\w)|timed? ?out|https?:|"
    r"no space|writer failed|input/output|read-only|too many open|quota",
    re.I,
)
# The kernel kills with SIGKILL when memory runs out; so says a shell of what it has started.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_CLIENT = re.compile(r"/(requests|urllib3?|httpx?|aiohttp|botocore|grpc)[/.]")
# It reports that a process that it started has failed: torchrun, accelerate.
_LAUNCHER = re.compile("ChildFailedError|CalledProcessError")
# A shell's pipe into what copies or filters the program's lines.
_PIPE = re.compile(
    r"(\S*/)?(ba)?sh (-\S+ )*-\w*c .*\|&?\s*(stdbuf \S+ )?"
    r"(\S*/)?(tee|cat|grep|sed|awk|ts|head|tail)\b[^|;&]*$",
    re.S,
)
# Which execute a notebook, and only ask whether its cells have failed.
_NOTEBOOK = re.compile(
    r"\b(jupyter[ -](nbconvert\b.*--execute|execute\b|run\b)|jupytext\b.*--execute|papermill )"
)
# The end of a traceback.
_ERROR = re.compile(r"^(?:\[\w+\]: ?)?[\w.]*(?:Error|Exception)\b.*", re.M)


def blamed_place(lines: Iterable[str], files: Sequence[str], container: Container) -> str:
    """Return where the last traceback was reading the snapshot of these files; "" if it was not.

    Only that counts against a snapshot: a service that is down, a full disk or a faulty GPU is
    no fault of its files.

    One whose error names a file of it has the same place as any other that does.
    """
    last = _last_traceback(lines)
    message, is_remote = _FRAME.split(last)[-1], _CLIENT.search(last)
    is_input = str(container.root / "input") in last
    if not (last and files) or is_remote or is_input or _ELSEWHERE.search(message):
        return ""
    names = {path.rpartition("/")[2] for path in _PATH.findall(message)}
    is_named = any("." in (name := Path(path).name) and name in names for path in files)
    if is_named or f"{container.checkpoints}/" in message:
        return "a file of it is named"
    if not _READING.search(_FRAME.sub(r"\3", last)):
        return ""
    return " ".join(f"{Path(name).name}:{line}" for name, line, _ in _FRAME.findall(last))


def _last_traceback(lines: Iterable[str]) -> str:
    tracebacks = "\n".join(lines).split(_TRACEBACK)[:0:-1]
    return next((text for text in tracebacks if not _LAUNCHER.search(text)), "")


def hidden_failures(command: str) -> tuple[str, str] | None:
    """Return an event's name, and why the command may end with 0 though what it runs has failed."""
    if not re.search("pipefail|PIPESTATUS", command) and _PIPE.match(command):
        text = "if the program fails, its pipe ends well, and the run has finished"
        return "pipe", f"{text}: write bash -eo pipefail -c"
    if _NOTEBOOK.search(command):
        text = "what a cell starts by ! or %run may fail, and the notebook ends well: then the "
        return "notebook", f"{text}run has finished. Import the code in the cell, or use %%bash"
    return None


def silent_end(lines: Sequence[str], exit_code: int) -> str:
    """Return how it ended, if neither a traceback nor its last lines say why; else ""."""
    text = "\n".join(lines)
    is_told = _TRACEBACK in text or _ELSEWHERE.search("\n".join(lines[-_LAST_LINES:]))
    return "" if is_told or exit_code in _KILLED else f"exit code {exit_code}"


def failure_reason(container: Container, exit_code: int, tail: Sequence[str]) -> str:
    """Return why it failed, in one line: from output/failure, else its last error or last line."""
    ended = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
    is_told = _LAUNCHER.search("\n".join(tail))  # whose report says nothing of the error
    errors = _ERROR.findall(_last_traceback(tail))[:1] if is_told else []
    text = last_line = ("", *tail[-1:], *errors)[-1]
    with suppress(OSError), (container.output / "failure").open("rb") as stream:
        text = stream.read(_REASON_BYTES).decode(errors="replace") or last_line
    hint = " (the kernel does this when memory runs out)" if exit_code in _KILLED else ""
    reason = " ".join(text.split())[:_REASON_BYTES]
    return f"the program ended with {ended}{hint}" + (f": {reason}" if reason else "")


def failures_in_a_row(
    before: Mapping[str, Any], began_with: int, step: int, seconds: float, *, has_committed: bool
) -> dict[str, int]:
    """Count the failures in a row that committed, and got no further than the first of them.

    Those that committed nothing are the Guard's to count. `before` is the last failure's event,
    `began_with` the number of the snapshot that this attempt was given, and `step` the furthest
    that is known. Where none is (-1), one that fails soon got no further, unless an attempt
    between the two has committed.
    """
    times = before.get("times", 0)
    if step < 0 and (seconds > _SOON_SECONDS or began_with > before.get("snapshot", 0)):
        return {}
    if not 0 < times < MOST_FAILURES or step > before["furthest_step"]:
        return {"furthest_step": step, "times": 1}
    return {"furthest_step": before["furthest_step"], "times": times + has_committed}


def why_given_up(series: Mapping[str, int]) -> str:
    """Return what is said of a run that has failed too often in a row; "" if it goes on."""
    if (times := series.get("times", 0)) < MOST_FAILURES:
        return ""
    step = series["furthest_step"]
    how = f"never after step {step}" if step >= 0 else f"each in {_SOON_SECONDS / 60:.0f} minutes"
    return f"it failed {times} times in a row, {how}"
