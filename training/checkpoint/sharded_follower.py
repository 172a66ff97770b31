"""A rank above 0 in the saves of a sharded stage: it writes its share when rank 0 says so."""

import itertools
import threading
from collections.abc import Callable, Sequence

from contract.keys import checkpoint_prefix
from training.checkpoint.host_copies import HostCopies
from training.checkpoint.read import refuse_nan
from training.checkpoint.sharded_leader import STAGED, TICK_SECONDS, Order, Written, place_on_board
from training.checkpoint.slices import SLICES
from training.checkpoint.state import Contents, HostCopy, LiveState, live_files
from training.checkpoint.transfer import CancelledError, Progress, send
from training.checkpoint.write import Tensors
from training.errors import RunFailedError
from training.ranks.context import Attempt
from training.ranks.world import World

_CLOSE_SECONDS = 10.0
_LISTEN_SECONDS = 0.1


class ShardedFollower:
    """Obeys at the points of a stage where rank 0 leads; keeps the copy that was staged."""

    def __init__(self, attempt: Attempt, num_copiers: int) -> None:
        self._attempt = attempt
        self._world = attempt.world
        self._images = HostCopies(num_copiers)
        self._writes: list[ShareWrite] = []  # under way, or over
        self._live: ShareWrite | None = None  # reads tensors that training changes
        self._staged: ShareWrite | None = None

    def obey(self, capture: Callable[[], LiveState]) -> bool:
        """Do what rank 0 orders until training goes on; whether there was something."""
        was_ordered = False
        while self._world.share_flag(False):
            order: Order | None = self._world.share(None)
            assert order is not None
            self._act(order, capture)
            was_ordered = True
        if self._live is not None:
            self._live.wait()
            self._live = None
        return was_ordered

    def give_up(self) -> None:
        """Rank 0 has decided what the attempt leaves behind; nothing else is of use."""
        for write in self._writes:
            write.cancel()

    def close(self) -> None:
        """Finish what is being written: its boundary was good, and rank 0 may publish it."""
        self._staged = None
        for write in self._writes:
            write.wait(_CLOSE_SECONDS)

    def _act(self, order: Order, capture: Callable[[], LiveState]) -> None:
        if order.verb == "drop":
            self._end([write for write in self._writes if write.name == order.name])
        elif order.verb == "stage":
            self._stage(order.name, capture)
        else:
            self._write(order.name, capture, is_live=order.verb == "live")

    def _end(self, writes: Sequence["ShareWrite"]) -> None:
        for write in writes:
            write.cancel()
            write.wait()

    def _stage(self, name: str, capture: Callable[[], LiveState]) -> None:
        share = capture()
        self._staged = None  # superseded, and its memory may be needed
        self._writes = [write for write in self._writes if not write.is_over]
        sending = next((write.image for write in self._writes if write.image), None)
        image = self._images.copy(share, sending)
        self._world.gather(image is not None)
        if image is not None:
            self._staged = ShareWrite(self._attempt, name, share, image, threading.Event())
            self._listen(self._staged)

    def _write(self, name: str, capture: Callable[[], LiveState], *, is_live: bool) -> None:
        over = threading.Event()
        # From here on: the first copy takes its time, page-locked memory above all.
        _tick(self._world, name, over)
        share = capture()
        self._staged = None  # superseded, and its memory may be needed
        # For rank 0 what came before is over: published, or never to be.
        self._end([write for write in self._writes if not write.is_over])
        image = None if is_live else self._images.copy(share, None)
        write = ShareWrite(self._attempt, name, share, image, over)
        self._writes = [write]
        self._live = write if image is None else None
        write.start()

    def _listen(self, staged: "ShareWrite") -> None:
        """Hear of the end while the main threads are in long work."""

        def listen() -> None:
            while self._staged is staged:
                if self._world.note(STAGED) == staged.name:
                    self.give_up()
                    _tick(self._world, staged.name, staged.over)
                    staged.start()
                    return
                staged.wait(_LISTEN_SECONDS)

        threading.Thread(target=listen, name="staged", daemon=True).start()


class ShareWrite:
    """This rank's files of one save, written and announced in a thread of its own."""

    def __init__(
        self,
        attempt: Attempt,
        name: str,
        share: LiveState,
        image: HostCopy | None,
        over: threading.Event,
    ) -> None:
        self.name = name
        self.image = image
        self.over = over  # announced, or cancelled
        self._attempt = attempt
        self._slices = share.state[SLICES]
        self._device = share.device
        self._files: Sequence[Contents] = live_files(share) if image is None else image.files
        self._tensors: Tensors = share.tensors if image is None else image.tensors
        self._progress = Progress()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is written any more."""
        return self.over.is_set()

    def start(self) -> None:
        """In a thread that may be left behind: a connection that hangs must not hold us."""
        threading.Thread(target=self._run, name="share", daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is over, at most so long; whether it is."""
        return self.over.wait(seconds)

    def cancel(self) -> None:
        """Write no more of it."""
        self._progress.stop.set()

    def _run(self) -> None:
        key = place_on_board(self.name, self._attempt.world.rank)
        try:
            written = self._write()
            if written is not None:
                self._attempt.world.post(key, written.to_text())
        finally:
            self.over.set()

    def _write(self) -> Written | None:
        prefix = checkpoint_prefix(self.name)
        try:
            files = send(
                self._attempt.store,
                prefix,
                self._files,
                self._device,
                self._progress,
                beside=[lambda: refuse_nan(self._tensors, self.name)],
            )
        except CancelledError:
            return None
        except RunFailedError as error:
            return Written(error=str(error), is_hopeless=True)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            return Written(error=str(error))
        return Written(files=files, slices=self._slices)


def _tick(world: World, name: str, over: threading.Event) -> None:
    """Show rank 0 that this rank is at work for a save, until that is over."""
    key = f"{place_on_board(name, world.rank)}/tick"

    def tick() -> None:
        for number in itertools.count():
            world.post(key, str(number))
            if over.wait(TICK_SECONDS):
                return

    threading.Thread(target=tick, name="tick", daemon=True).start()
