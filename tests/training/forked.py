"""Runs work in a forked process, so that it does not change torch in this one.

A backward pass over fake tensors starts autograd's device threads, and torch then refuses every
backward pass in a fork of that process: the tests that fork attempts would fail after it.
"""

import io
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from training.cli.main import main
from training.durable.report.progress import configure_logging

T = TypeVar("T")
_ATTEMPTS = 3


class Done(NamedTuple):
    """A command's exit code and what it printed."""

    code: int
    out: str
    err: str


def in_fork(act: Callable[[], T]) -> T:
    """Return or raise what `act` does in a forked process.

    One that aborts is tried again: autograd's new threads have been seen to do so in a fork of a
    process in which many tests had run. EOFError if it ends otherwise without a word.
    """
    for _ in range(_ATTEMPTS):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                answer = (True, act())
            except BaseException as error:  # the parent raises it
                answer = (False, error)  # type: ignore[assignment]
            with os.fdopen(writer, "wb") as stream:
                pickle.dump(answer, stream)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            said = stream.read()
        _, status = os.waitpid(pid, 0)
        if said:
            is_result, value = pickle.loads(said)
            if not is_result:
                raise value
            result: T = value
            return result
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGABRT:
            break
    raise EOFError(f"the forked process ended without a word, status {status}")


def command(arguments: Sequence[str], before: Callable[[], None] = lambda: None) -> Done:
    """Run one command of the trainer in a forked process, after what it does `before`."""

    def act() -> Done:
        before()
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(arguments)
        return Done(code, out.getvalue(), err.getvalue())

    return in_fork(act)


def run_module(
    words: Sequence[str], *, cwd: Path, input: str, **_: bool
) -> subprocess.CompletedProcess[str]:
    """For `subprocess.run` of `python -m MODULE`: in a fork, which has imported most already."""

    def act() -> Done:
        with tempfile.TemporaryFile() as given:
            given.write(input.encode())
            given.flush()
            os.dup2(given.fileno(), 0)
        os.chdir(cwd)
        sys.argv = [*words[2:]]
        out, err, code = io.StringIO(), io.StringIO(), None
        with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                runpy.run_module(words[2], run_name="__main__")
            except SystemExit as end:
                code = end.code
            except ImportError as error:  # as where the room is tested alone
                return Done(1, "", str(error))
        return Done(int(code or 0), out.getvalue(), err.getvalue())

    return subprocess.CompletedProcess(list(words), *in_fork(act))


class ForkedTrainer:
    """What a sweep needs of `subprocess.Popen`, without the four seconds of imports."""

    def __init__(
        self, words: Sequence[str], *, stdout: IO[bytes], stderr: int, start_new_session: bool
    ) -> None:
        assert list(words[1:3]) == ["-m", "training"]
        assert stderr == subprocess.STDOUT and start_new_session
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                with (
                    open(stdout.fileno(), "w", closefd=False) as log,
                    redirect_stdout(log),
                    redirect_stderr(log),
                ):
                    configure_logging()
                    code = main(words[3:])
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """The exit code, once it has exited."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode
