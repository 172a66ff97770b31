"""When a folder may be captured: the program says so, or nothing changed for a quiet time.

Nothing is open for writing then either, as far as the system tells (open_files.py).
"""

import time
from dataclasses import dataclass

from training.snapshot.listing import Listing, is_log
from training.snapshot.open_files import open_for_writing


@dataclass(kw_only=True, slots=True)
class QuietTime:
    """How long a folder has stood still, as far as somebody looked."""

    listing: Listing | None = None
    since: float = 0.0  # monotonic
    held_open: str | None = None  # what was open for writing at the last look

    def look(self, listing: Listing) -> float:
        """Take note of the folder as it is now; return for how many seconds it has been so."""
        now = time.monotonic()
        if self.listing is None or self.listing.difference(listing) is not None:
            self.since = now
        self.listing = listing
        return now - self.since

    def is_closed(self) -> bool:
        """Whether nothing of the folder is open for writing."""
        assert self.listing is not None
        files = self.listing.files.items()
        inodes = {(f.device, f.inode): path for path, f in files if not is_log(path)}
        paths = sorted(inodes[key] for key in open_for_writing(inodes))
        self.held_open = paths[0] if paths else None
        return not paths
