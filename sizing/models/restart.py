"""How long a machine takes to its first step, and how long its steps wait for data after that.

A workload's trainer starts once the sync has begun, which goes on while it starts and restores, and
fetches the rest of the epoch first, in the order of its steps. It needs what the first step reads,
all of the dataset if it declares no less (`Train.first_files`); a program waits for all before its
start. After that, steps that use data faster than data arrive are as slow as these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sizing.models.constants import MIB, Constants
from sizing.models.data_path import Rate

# Parts that a sync fetches at once, of the most bytes (training/durable/store): these come before
# what is asked for.
IN_FLIGHT_BYTES = 16 * 8 * MIB
# One core's time for a file, from a sync of files of some bytes.
FILE_SECONDS = 1.5e-3
# Shares of an epoch that may be over when a machine takes over: any is as likely.
ANYWHERE = tuple((place + 0.5) / 10 for place in range(10))


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Seconds until a machine trains, without the wait for capacity, part by part.

    `sync` is the wait for data before the first step, `data_wait` that of all steps after it, which
    slows down the first epochs; `resume` restores the checkpoint.
    """

    launch: float
    user_data: float
    sync: float
    resume: float
    first_step: float
    data_wait: float

    @property
    def to_training(self) -> float:
        """Seconds from the request to the first step."""
        return self.launch + self.user_data + self.sync + self.resume + self.first_step

    @property
    def seconds(self) -> float:
        """All of them: what a restart adds to a run."""
        return self.to_training + self.data_wait

    def sentence(self) -> str:
        """Return the arithmetic in one sentence."""
        return (
            f"launch {self.launch:.0f} (from memory) + user data {self.user_data:.0f} + resume "
            f"{self.resume:.0f} + first step {self.first_step:.0f} + waits for the dataset's sync "
            f"{self.sync:.0f} before that step and {self.data_wait:.0f} after it"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """A dataset on its way from S3: network, volume and a core work at once, the slowest decides.

    `first_bytes` is what the first step needs, `epoch_seconds` an epoch's time if no step waits,
    `file_seconds` the core's time for all of its files.
    """

    network: Rate
    volume: Rate
    num_bytes: float
    first_bytes: float
    epoch_seconds: float
    file_seconds: float = 0.0
    in_flight_bytes: float = IN_FLIGHT_BYTES
    is_of_program: bool = False

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that this many bytes take from the sync's start on."""
        return max(self.network.seconds(num_bytes), self.volume.seconds(num_bytes))

    def bytes_by(self, seconds: float) -> float:
        """Return the bytes that arrive by then."""
        return min(self.network.bytes_by(seconds), self.volume.bytes_by(seconds))

    def restart(
        self, constants: Constants, *, restored_bytes: float = 0.0, passed: Sequence[float] = (0.0,)
    ) -> Restart:
        """Return the start of a machine that restores this many bytes, over the same network.

        `passed` are the equally likely shares of the epoch that earlier machines have trained: 0
        for the first. Only what is left of it is asked for first.
        """
        resume = self.seconds(restored_bytes)
        # What arrived before it was asked for is as likely to be needed as any other part.
        ahead = 0.0 if self.is_of_program else constants.first_step_seconds + resume
        moved = self.bytes_by(ahead)
        there = max(0.0, moved - restored_bytes) / max(1.0, self.num_bytes)
        if self.file_seconds:
            there = min(there, ahead / self.file_seconds)
            moved = min(moved, restored_bytes + there * self.num_bytes)
        asked = min(self.first_bytes + self.in_flight_bytes, self.num_bytes)
        missing = asked * max(0.0, 1 - there)
        share = there + missing / max(1.0, self.num_bytes)
        asked_by = max(self.seconds(moved + missing), share * self.file_seconds)
        wait = max(0.0, asked_by - ahead) if missing else 0.0
        whole = self.num_bytes + (0.0 if self.is_of_program else restored_bytes)
        left = max(0.0, max(self.seconds(whole), self.file_seconds) - ahead - wait)
        return Restart(
            launch=constants.launch_seconds,
            user_data=constants.user_data_seconds,
            sync=wait,
            resume=resume,
            first_step=constants.first_step_seconds,
            data_wait=fmean(self._data_wait(left, share) for share in passed),
        )

    def _data_wait(self, left: float, passed: float) -> float:
        """Return the steps' waits if a sync has `left` seconds to go and `passed` is over.

        They use the rest of the epoch as it arrives, then the files that only its beginning read,
        which may not be there when the next epoch reads them, spread over all of it.
        """
        steps, arrival = (1 - passed) * self.epoch_seconds, (1 - passed) * left
        later = left - max(steps, arrival)
        return max(0.0, arrival - steps) + max(0.0, later - self.epoch_seconds)
