"""What the store has already of a folder: what a next snapshot need not send again."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from training.save.listing import FileState
from training.save.manifest import Content, Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """Contents in the store, of files that were seen and by their checksums."""

    files: Mapping[FileState, Content] = field(default_factory=dict)
    contents: Mapping[str, Content] = field(default_factory=dict)
    blobs: Mapping[str, int] = field(default_factory=dict)  # name -> bytes

    def with_earlier(self, earlier: "Known") -> "Known":
        """Also what was known when a capture left it out, before the snapshot in between."""
        return Known(
            files={**earlier.files, **self.files},
            contents=self.contents,
            blobs={**earlier.blobs, **self.blobs},
        )


def known_after(snapshot: Snapshot, files: Mapping[FileState, Content]) -> Known:
    """What the next snapshot may use: no blob of which this one needs less than half.

    What lies in such a blob is captured and sent again: at most half of what is stored is waste.
    """
    needed: dict[str, int] = {}
    for content in snapshot.contents.values():
        if content.blob is not None:
            needed[content.blob] = needed.get(content.blob, 0) + content.bytes
    wasteful = {blob for blob, count in needed.items() if 2 * count < snapshot.blobs[blob]}
    return Known(
        files={state: c for state, c in files.items() if c.blob not in wasteful},
        contents={sha: c for sha, c in snapshot.contents.items() if c.blob not in wasteful},
        blobs=snapshot.blobs,
    )
