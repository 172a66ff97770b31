"""The state of all ranks at one step boundary as what a save sends: live tensors, or their copy."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.keys import checkpoint_prefix
from training.attempt.notice import Notice
from training.record.head import CheckpointEntry, Head, Kind, Position
from training.save.layout import SLICES
from training.save.memory import allocate, view_of
from training.save.publish import Save
from training.save.sharded_saves import ShardedLeader, merged, refuse_wrong_sizes
from training.save.state import HostCopy, LiveState, refuse_nan, state_file
from training.store.protocol import Store
from training.store.transfer import FileEntry, TransferProgress, send


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What is to be saved, and why. The live state is good only until the next step starts."""

    name: str  # of the checkpoint
    kind: Kind
    position: Position
    epoch: int
    state: LiveState
    seconds_left: float | None = None  # of the stage, at the pace so far


class TensorSource:
    """The state that was requested, read from its live tensors or from a copy on the host."""

    def __init__(
        self,
        store: Store,
        request: SaveRequest,
        state: LiveState | HostCopy,
        *,
        leader: ShardedLeader | None = None,
        since_notice: Position | None = None,
    ) -> None:
        self.request = request
        self.state = state
        self.notice: Notice | None = None  # that the save answers
        self._store = store
        self._since_notice = since_notice  # committed at a notice, after which training continued
        self._leader = leader  # the other ranks write their shares
        # The JSON of a sharded checkpoint is written once the other ranks have announced theirs.
        self._files = [*state.files, *([] if leader else [state_file(state.state)])]

    @property
    def num_bytes(self) -> int:
        """Total bytes of the files that this process writes."""
        return sum(file.size for file in self._files)

    def entry(self, head: Head) -> CheckpointEntry:
        """The entry that the policy has requested."""
        request, position = self.request, self.request.position
        return CheckpointEntry(
            name=request.name,
            step=position.step,
            stage=position.stage,
            epoch=request.epoch,
            kind=request.kind,
            files=(),
            is_best=position.best.get("step") == position.step,
            seconds_left=request.seconds_left,
        )

    def send(
        self, name: str, progress: TransferProgress, beside: Sequence[Callable[[], None]]
    ) -> tuple[FileEntry, ...]:
        """Send the tensors, of a sharded stage those of all ranks; refuses weights with a NaN."""
        store, prefix = self._store, checkpoint_prefix(name)
        tasks = [self._refuse_nan, *beside]
        mine = send(store, prefix, self._files, progress, beside=tasks, allocate=self._spare)
        if self._leader is None:
            return mine
        shares = self._leader.wait_for(name, progress.stop)
        files = (*mine, *(file for share in shares for file in share.files))
        refuse_wrong_sizes(store.sizes(prefix), prefix, files)
        slices = merged([self.state.state[SLICES], *(s.slices for s in shares if s.slices)])
        json_file = state_file({**self.state.state, SLICES: slices})
        return files + send(store, prefix, [json_file], progress)

    def discard(self) -> None:
        """No-op: the memory of a copy is used again."""

    def facts(self) -> Mapping[str, Any]:
        """What an answer to a notice, or the extra time after it, was worth."""
        if self._since_notice is not None:
            return {"gained_steps": self.request.position.step - self._since_notice.step}
        if self.notice is not None:
            since = time.monotonic() - self.notice.received
            return {"notice_to_commit_seconds": round(since, 4)}
        return {}

    def _spare(self, size: int) -> memoryview:
        return view_of(allocate(size, self.state.device))

    def _refuse_nan(self) -> None:
        position = self.request.position
        where = f"stage {position.stage!r}, step {position.step}"
        refuse_nan(self.state.tensors, position.step, where)


class TensorSave(Save[TensorSource]):
    """A save of tensors, which may answer a notice."""

    @property
    def request(self) -> SaveRequest:
        """What is saved, and why."""
        return self.source.request

    def answer(self, notice: Notice, *, releases: bool) -> None:
        """Make it the answer to the notice; with `releases` its commit also releases the lease."""
        self.source.notice, self.releases = notice, releases
