"""A rank above 0 in the saves of a sharded stage: it writes its share when rank 0 orders it."""

import itertools
import threading
from collections.abc import Callable

from contract.keys import checkpoint_prefix
from training.attempt.context import AttemptContext
from training.attempt.world import World
from training.errors import DivergedError
from training.save.sharded_leader import (
    STAGED,
    TICK_SECONDS,
    Order,
    WrittenShare,
    share_key,
)
from training.save.slices import SLICES
from training.save.state import HostCopies, HostCopy, LiveState, refuse_nan, step_of
from training.save.transfer import send
from training.store.parts import CancelledError, TransferProgress

_CLOSE_SECONDS = 10.0
_LISTEN_SECONDS = 0.1


class ShardedFollower:
    """Obeys at the points of a stage where rank 0 leads; keeps the copy that was staged."""

    def __init__(self, context: AttemptContext, num_copiers: int) -> None:
        self._context = context
        self._world = context.world
        self._copies = HostCopies(context.store.part_process, num_copiers)
        self._writes: list[ShareWrite] = []  # under way, or over
        self._live: ShareWrite | None = None  # reads tensors that training changes
        self._staged: ShareWrite | None = None

    def obey(self, capture: Callable[[], LiveState]) -> bool:
        """Carry out rank 0's orders until training continues; return whether there were any."""
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
        """Cancel every write: rank 0 has decided what the attempt leaves behind."""
        for write in self._writes:
            write.cancel()

    def close(self) -> None:
        """Finish the writes under way: their state was good, and rank 0 may commit it."""
        self._staged = None
        for write in self._writes:
            write.wait(_CLOSE_SECONDS)

    def _act(self, order: Order, capture: Callable[[], LiveState]) -> None:
        if order.verb == "drop":
            self._cancel([write for write in self._writes if write.name == order.name])
        elif order.verb == "stage":
            self._stage(order.name, capture)
        else:
            self._write(order.name, capture, is_live=order.verb == "live")

    def _cancel(self, writes: "list[ShareWrite]") -> None:
        for write in writes:
            write.cancel()
            write.wait()

    def _stage(self, name: str, capture: Callable[[], LiveState]) -> None:
        share = capture()
        self._staged = None  # superseded, and its memory may be needed
        self._writes = [write for write in self._writes if not write.is_over]
        sources = (write.source for write in self._writes)
        writing = next((source for source in sources if isinstance(source, HostCopy)), None)
        copy = self._copies.copy(share, writing)
        self._world.gather(copy is not None)
        if copy is not None:
            self._staged = ShareWrite(self._context, name, copy, threading.Event())
            self._listen(self._staged)

    def _write(self, name: str, capture: Callable[[], LiveState], *, is_live: bool) -> None:
        over = threading.Event()
        # Before the copy: the first one takes its time, page-locked memory above all.
        _tick(self._world, name, over)
        share = capture()
        self._staged = None  # superseded, and its memory may be needed
        # For rank 0 the earlier saves are over: committed, or never to be.
        self._cancel([write for write in self._writes if not write.is_over])
        copy = None if is_live else self._copies.copy(share, None)
        write = ShareWrite(self._context, name, copy or share, over)
        self._writes = [write]
        self._live = write if copy is None else None
        write.start()

    def _listen(self, staged: "ShareWrite") -> None:
        """Watch for the order to write the staged copy while the main threads are in long work."""

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
    """The write of this rank's files of one save, in a thread of its own, and its announcement."""

    def __init__(
        self,
        context: AttemptContext,
        name: str,
        source: LiveState | HostCopy,
        over: threading.Event,
    ) -> None:
        self.name = name
        self.source = source
        self.over = over  # announced, or cancelled
        self._context = context
        self._slices = source.state[SLICES]
        self._progress = TransferProgress()

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it will be written."""
        return self.over.is_set()

    def start(self) -> None:
        """Run in a daemon thread, so that a connection that hangs cannot keep the process alive."""
        threading.Thread(target=self._run, name="share", daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, for up to `seconds`; return whether it is."""
        return self.over.wait(seconds)

    def cancel(self) -> None:
        """Stop writing."""
        self._progress.stop.set()

    def _run(self) -> None:
        key = share_key(self.name, self._context.world.rank)
        try:
            written = self._write()
            if written is not None:
                self._context.world.post(key, written.to_text())
        finally:
            self.over.set()

    def _write(self) -> WrittenShare | None:
        source = self.source
        try:
            files = send(
                self._context.store,
                checkpoint_prefix(self.name),
                source.files,
                source.device,
                self._progress,
                beside=[lambda: refuse_nan(source.tensors, step_of(self.name), self.name)],
            )
        except CancelledError:
            return None
        except DivergedError as error:
            return WrittenShare(error=error.divergence.message, has_nan=True)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            return WrittenShare(error=str(error))
        return WrittenShare(files=files, slices=self._slices)


def _tick(world: World, name: str, over: threading.Event) -> None:
    """Show rank 0 that this rank is at work on a save, until it is over."""
    key = f"{share_key(name, world.rank)}/tick"

    def tick() -> None:
        for number in itertools.count():
            world.post(key, str(number))
            if over.wait(TICK_SECONDS):
                return

    threading.Thread(target=tick, name="tick", daemon=True).start()
