"""`python -m rehearsal`; see rehearsal/rehearsal_command.py."""

import io
import os
import sys

try:
    from rehearsal.rehearsal_command import main
except KeyboardInterrupt:
    print("interrupted before it started", file=sys.stderr, flush=True)
    # After one that passed an exec() of text, Python's own exit would end by the signal itself.
    os._exit(130)

if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a file, too, before what stderr says next
    status = main()
    # The interpreter's own exit would take an embedded AWS apart for seconds.
    sys.stdout.flush()
    os._exit(status)
