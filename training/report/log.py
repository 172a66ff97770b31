"""The lines that a command prints about its work, through the logging module.

A module writes `logging.getLogger(__name__).info("[save] ...")`; a command that runs training calls
`configure_logging` once. The text is all of the line; the journal adds time and level.
"""

import logging
import sys
from typing import TextIO

_ROOT = logging.getLogger("training")


class _Stdout(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stdout is now: commands and tests redirect it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def configure_logging(level: int = logging.INFO) -> None:
    """Print the lines of this level and above on standard output, each at once."""
    if not any(isinstance(handler, _Stdout) for handler in _ROOT.handlers):
        _ROOT.addHandler(_Stdout())
        _ROOT.propagate = False
    _ROOT.setLevel(level)
