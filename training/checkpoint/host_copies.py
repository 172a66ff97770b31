"""Copies of a state on the host, whose memory later copies use again."""

from training.checkpoint.memory import available_bytes
from training.checkpoint.state import HostCopy, LiveState

# What a copy of the state must leave to everything else on the machine.
_SPARE_BYTES = 512 * 1024 * 1024


class HostCopies:
    """At most two: one that is being sent, and the next."""

    def __init__(self, num_copiers: int = 1) -> None:
        self._images: list[HostCopy] = []
        self._num_copiers = num_copiers  # processes of this machine that copy at the same moment

    def copy(self, capture: LiveState, sending: HostCopy | None) -> HostCopy | None:
        """Copy to the host; None where memory cannot hold it beside what is still being sent."""
        self._images = [i for i in self._images if i is sending or i.fits(capture)]
        image = next((i for i in self._images if i is not sending), None)
        if image is None:
            free = available_bytes()
            if free is not None and free - self._num_copiers * capture.num_bytes < _SPARE_BYTES:
                return None
            image = HostCopy(capture)
            self._images.append(image)
        image.fill(capture)
        return image
