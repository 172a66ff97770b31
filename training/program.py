"""`commit`, for programs that save when they choose to. Standard library only."""

import os
import time
from pathlib import Path

_POLL_SECONDS = 0.02


def commit() -> None:
    """Have the checkpoint folder committed as it is now; return once later writes cannot harm that.

    For programs; does nothing where the program is not mirrored, as on another machine. Only the
    first of several ranks asks, as another may call it while the first is still writing.
    """
    name = os.environ.get("TRAINING_COMMIT_FILE")
    if not name:
        return
    asked = Path(name)
    if os.environ.get("RANK", "0") == "0":
        asked.touch()
    while asked.exists():
        time.sleep(_POLL_SECONDS)
