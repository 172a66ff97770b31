"""Faults of AWS and the metadata service: errors, delays, lost answers, a clock that is off.

They affect instances, the Guard and whoever submits jobs; never the CDK CLI or the rehearsal.
"""

import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

METADATA = "metadata"
JOB_SERVICES = ("batch", "sagemaker")
SERVICES = ("s3", "ec2", "autoscaling", "ssm", "cloudwatch", "sts", "sns", *JOB_SERVICES, METADATA)
MACHINES, GUARD, SUBMITTERS = "machines", "guard", "submitters"
_ACTION = re.compile(rf"({'|'.join(SERVICES)}):[A-Za-z*]+")
# No reader waits long enough for one to give up.
_PACKET_BYTES, _PACKETS_PER_SECOND, _CREDIT_SECONDS = 16 * 1024, 10, 0.2
LOWEST_ERROR, HIGHEST_ERROR = 400, 599


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault that, once begun, hits a share of the requests for an action (* is a wildcard).

    Exactly one must be set: `status` answers with this error, `delay_seconds` delays the answer,
    `loses_answer` carries the request out, then resets the connection, `bytes_per_second` is the
    rate of a line that all answers it hits share. `key` is the S3 key or the
    metadata path, and may have wildcards. `of` says whose requests: the machines', the Guard's, or
    (to Batch and SageMaker) those of whoever submits jobs.
    """

    action: str
    key: str = "*"
    status: int = 0
    delay_seconds: float = 0.0
    loses_answer: bool = False
    bytes_per_second: float = 0.0
    share: float = 1.0
    for_seconds: float = math.inf
    of: str = MACHINES

    def __post_init__(self) -> None:
        if not _ACTION.fullmatch(self.action):
            raise ValueError(
                f"action is {self.action!r}; write it like ec2:TerminateInstances or s3:*, for one "
                f"of {', '.join(SERVICES)}"
            )
        kinds = (self.status, self.delay_seconds, self.loses_answer, self.bytes_per_second)
        if sum(map(bool, kinds)) != 1:
            raise ValueError(
                f"the fault of {self.action} needs exactly one of status, delay_seconds, "
                "loses_answer and bytes_per_second"
            )
        if self.of not in (MACHINES, GUARD, SUBMITTERS):
            raise ValueError(f"of is {self.of!r}; use {MACHINES}, {GUARD} or {SUBMITTERS}")
        if self.status and not LOWEST_ERROR <= self.status <= HIGHEST_ERROR:
            raise ValueError(f"status is {self.status}; use an error, {LOWEST_ERROR} to 599")
        for name in ("delay_seconds", "bytes_per_second"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be above 0 and at most 1")

    def covers(self, action: str, key: str) -> bool:
        """Whether the fault applies to requests for this action and key."""
        return fnmatchcase(action, self.action) and fnmatchcase(key, self.key)


@dataclass(kw_only=True, slots=True)
class FaultInjector:
    """The faults in force; thread-safe."""

    clock: Callable[[], float] = time.monotonic
    # How far AWS's clock is ahead of the machines' clocks.
    clock_ahead_seconds: float = 0.0
    # Faults that have hit a request since the last end().
    met: set[Fault] = field(default_factory=set)
    _began: float = 0.0
    _faults: Sequence[Fault] = ()
    # Seeded, so that a repeated drill meets the same faults.
    _dice: random.Random = field(default_factory=lambda: random.Random(0))
    _line_is_free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, faults: Sequence[Fault]) -> None:
        """Replace the faults in force, starting now."""
        with self._lock:
            self._faults, self._began = faults, self.clock()

    def end(self) -> None:
        """End all faults, including the clock's."""
        self.begin(())
        self.clock_ahead_seconds = 0.0
        self.met.clear()

    def meet(self, action: str, key: str = "", of: str = MACHINES) -> Fault | None:
        """Return the fault that hits a request, after waiting out its delay."""
        with self._lock:
            seconds = self.clock() - self._began
            found = next(
                (
                    each
                    for each in self._faults
                    if each.of == of
                    and each.covers(action, key)
                    and seconds < each.for_seconds
                    and self._dice.random() < each.share
                ),
                None,
            )
            if found is not None:
                self.met.add(found)
        if found is not None and found.delay_seconds:
            time.sleep(found.delay_seconds)
        return found

    def paced(self, chunks: Iterable[bytes], bytes_per_second: float) -> Iterator[bytes]:
        """Yield an answer's bytes as they arrive over a line that others use at the same time."""
        size = max(1, min(_PACKET_BYTES, int(bytes_per_second / _PACKETS_PER_SECOND)))
        for chunk in chunks:
            for first in range(0, len(chunk), size):
                packet = chunk[first : first + size]
                with self._lock:
                    # A server that was late, on a busy machine, catches up.
                    begins = max(self.clock() - _CREDIT_SECONDS, self._line_is_free_at)
                    self._line_is_free_at = begins + len(packet) / bytes_per_second
                    wait = self._line_is_free_at - self.clock()
                time.sleep(max(0.0, wait))
                yield packet
