"""How long a folder has stood still, and whether anything in it was open for writing then."""

import time
from dataclasses import dataclass, field

from training.save.listing import Listing, is_log
from training.save.open_files import open_for_writing, processes

_NOT_LOOKED = "a file, perhaps,"


@dataclass(kw_only=True, slots=True)
class QuietTime:
    """A folder as it was at each look."""

    listing: Listing | None = None
    since: float = 0.0  # monotonic: the first look at which it was as it is now
    # A file that somebody could write to, as far as is known of the folder as it is now.
    held_open: str | None = _NOT_LOOKED
    # Processes that lived when the last change was seen, and live: one of them made it.
    writers: set[int] = field(default_factory=set)
    # The first process of the program: what it wrote last before it died may be half of a file.
    program: int | None = None

    def look(self, listing: Listing) -> float:
        """Take note of the folder as it is now; return for how many seconds it has been so."""
        now, alive = time.monotonic(), processes()
        if self.listing is None or self.listing.difference(listing) is not None:
            self.writers = alive
            self.since = now
            self.held_open = _NOT_LOOKED
        elif not self.writers <= alive:
            # One that died may have had a file half written: the death closed it.
            self.writers &= alive
            self.since = now
            self.held_open = _NOT_LOOKED
        self.listing = listing
        return now - self.since

    def is_closed(self) -> bool:
        """Whether nothing of the folder is open for writing now."""
        assert self.listing is not None
        files = self.listing.files.items()
        inodes = {(f.device, f.inode): path for path, f in files if not is_log(path)}
        paths = (inodes[key] for key in open_for_writing(inodes))
        self.held_open = min(map(repr, paths), default=None)
        alive = processes()
        has_died = bool(alive) and self.program not in (None, *alive)
        if has_died or not self.writers <= alive:
            self.held_open = _NOT_LOOKED
        return self.held_open is None

    @property
    def found_open(self) -> str | None:
        """The file that was found open at the last look; None if there was none, or no look."""
        return None if self.held_open == _NOT_LOOKED else self.held_open

    def seconds_until_now(self, listing: Listing) -> float:
        """For how long the folder was as it is now at the last look; 0 if it has changed since."""
        if self.listing is None or self.listing.difference(listing) is not None:
            return 0.0
        return time.monotonic() - self.since
