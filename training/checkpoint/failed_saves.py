"""Saves that failed in a row: when the next one is tried, and when the attempt is to end."""

import time

# Both must be reached: a store may be away for minutes, and a disk that is full fails at once.
_MOST_IN_A_ROW = 5
_MOST_SECONDS = 600.0
_FIRST_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 120.0


class FailedSaves:
    """Counts them; a save that is committed ends the row."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._first = 0.0  # when the first of the row was begun
        self._retry_at = 0.0

    @property
    def is_retry_due(self) -> bool:
        """Whether one has failed, and the next try need not wait for the interval."""
        return self.in_a_row > 0 and time.monotonic() >= self._retry_at

    @property
    def is_hopeless(self) -> bool:
        """Whether so many have failed over so long that training on would be paid for nothing."""
        seconds = time.monotonic() - self._first
        return self.in_a_row >= _MOST_IN_A_ROW and seconds >= _MOST_SECONDS

    def count(self, began: float) -> None:
        """One more has failed, which was begun then."""
        if not self.in_a_row:
            self._first = began
        wait = min(_FIRST_RETRY_SECONDS * 2**self.in_a_row, _LONGEST_RETRY_SECONDS)
        self.in_a_row += 1
        self._retry_at = time.monotonic() + wait

    def end(self) -> None:
        """A save was committed."""
        self.in_a_row = 0
