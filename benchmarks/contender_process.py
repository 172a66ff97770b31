"""A contender in a process of its own: it makes as many steps as each line of its input says."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_REPOSITORY = Path(__file__).parents[1]
_MIB = 2**20


class _Contender(Protocol):
    @property
    def name(self) -> str: ...

    def to_json(self) -> str: ...


class ContenderProcess:
    """`python -m MODULE JSON`; `steps` waits for it."""

    def __init__(self, module: str, contender: _Contender) -> None:
        print(contender.name, file=sys.stderr)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, contender.to_json()],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.result = self._read()

    def steps(self, count: int) -> dict[str, Any]:
        """Make steps, unless it has failed."""
        if "failed" not in self.result:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{count}\n")
            self._process.stdin.flush()
            self.result |= self._read()
        return self.result

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:] or ["no word"]
        return {"failed": last[0][:160]}

    def __enter__(self) -> "ContenderProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def in_turns(
    module: str, contenders: Sequence[_Contender], rounds: int, warm_steps: int = 1
) -> list[dict[str, Any]]:
    """All at once, one step each in turn: what slows the machine for a while slows all."""
    with ExitStack() as stack:
        processes = [stack.enter_context(ContenderProcess(module, each)) for each in contenders]
        for process in processes:
            process.steps(warm_steps)
        taken: list[list[float]] = [[] for _ in processes]
        for _ in range(rounds):
            for process, own in zip(processes, taken, strict=True):
                own.append(process.steps(1).get("seconds", float("nan")))
        return [
            process.result | {"seconds": statistics.median(own)}
            for process, own in zip(processes, taken, strict=True)
        ]


def alone(
    module: str,
    contender: _Contender,
    deadline: float,
    *,
    warm_steps: int,
    num_steps: int,
    least_seconds: float,
) -> dict[str, Any]:
    """One with nothing beside it, unless less than `least_seconds` are left until the deadline."""
    if time.monotonic() > deadline - least_seconds:
        return {"failed": "no time was left"}
    with ContenderProcess(module, contender) as process:
        process.steps(warm_steps)
        return process.steps(num_steps)


class TimedSteps(ABC):
    """What the process does: it makes steps and measures them."""

    def __init__(self, device: str, floor_bytes: int) -> None:
        self._device = torch.device(device)
        self._floor = floor_bytes
        torch.manual_seed(0)
        torch.set_num_threads(1)

    @abstractmethod
    def step(self) -> Tensor:
        """Make one step; return a number of it."""

    def steps(self, count: int) -> dict[str, Any]:
        """Make steps; their median seconds, the last result, and the peak of memory in MiB."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_peak()
        seconds = [self._timed() for _ in range(count)]
        return {
            "seconds": statistics.median(s for s, _ in seconds),
            "result": seconds[-1][1],
            "mib": self._peak_mib(),
        }

    def answer(self, parameters: int) -> None:
        """Make as many steps as each line of the input says; answer with a line of JSON."""
        print(json.dumps({"parameters": parameters}), flush=True)
        for line in sys.stdin:
            print(json.dumps(self.steps(int(line))), flush=True)

    def _timed(self) -> tuple[float, float]:
        # Beside other work a CPU's time says more than the clock's.
        clock = time.perf_counter if self._device.type == "cuda" else time.process_time
        began = clock()
        result = self.step().item()  # waits for the device
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return clock() - began, result

    def _peak_mib(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) // _MIB
        return (resident_bytes("VmHWM") - self._floor) // _MIB


def resident_bytes(field: str) -> int:
    """A figure of this process's memory: VmRSS, or VmHWM for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def _reset_peak() -> None:
    """Let VmHWM begin again."""
    Path("/proc/self/clear_refs").write_text("5")
