"""Why a program failed, in one line, and whether its traceback blames the snapshot it began with.

Only that counts against a snapshot: a service that is down, a full disk or a faulty GPU says
nothing about its files.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from training.program.container import Container

_REASON_BYTES = 1024  # as SageMaker reads output/failure
_TRACEBACK = "Traceback (most recent call last)"
# Its file, line, function and code; torchrun prefixes lines with a rank.
_FRAME = re.compile(r'File "(.+?)", line (\d+), (in .*(?:\n(?:\[\w+\]:)? {4}.*)*)')
_PATH = re.compile(r"[\w./-]+\w")
# What reads a saved state: `torch.load`, `read`, `restore_from`; not `DataLoader`, `download`.
_READING = re.compile(r"(?<!down)(?<!up)load(?!er)|(?<![a-z])read(?!y)|restore|resum|pickl", re.I)
# The machine's errors, or those of another one.
_ELSEWHERE = re.compile(
    r"connect|timed? ?out|https?:|network|cuda|nccl|memory|no space|input/output|quota", re.I
)


def blamed_place(lines: Iterable[str], files: Sequence[str], container: Container) -> str:
    """Return where the last traceback was reading the snapshot of these files; "" if it was not.

    One that names a file of it has the same place as any other that does.
    """
    _, found, last = "\n".join(lines).rpartition(_TRACEBACK)
    frames, said = _FRAME.findall(last), _FRAME.split(last)[-1]
    if not (found and files) or _ELSEWHERE.search(said) or str(container.root / "input") in last:
        return ""
    paths = set(_PATH.findall(last))
    names = {name for path in paths if "." in (name := path.rpartition("/")[2])}
    if any(f"{container.checkpoints}/{p}" in paths or Path(p).name in names for p in files):
        return "a file of it is named"
    if not _READING.search(_FRAME.sub(r"\3", last)):
        return ""
    return " ".join(f"{Path(name).name}:{line}" for name, line, _ in frames)


def failure_reason(container: Container, exit_code: int, tail: Sequence[str]) -> str:
    """Return why the program failed, in one line: from output/failure, else its last line."""
    ended = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
    text = last_line = tail[-1] if tail else ""
    try:
        with (container.output / "failure").open("rb") as stream:
            text = stream.read(_REASON_BYTES).decode(errors="replace") or last_line
    except OSError:
        pass
    hint = " (the kernel does this when memory runs out)" if exit_code == -9 else ""
    said = " ".join(text.split())[:_REASON_BYTES]
    return f"the program ended with {ended}{hint}" + (f": {said}" if said else "")
