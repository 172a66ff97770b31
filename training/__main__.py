"""`python -m training`; see training/cli/main.py."""

import faulthandler
import gc
import os
import sys

try:
    from contract.errors import Exit
    from training.cli.main import main
except KeyboardInterrupt:
    print("interrupted before it began", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    # systemd and rank 0 end a hung process by SIGABRT: the log then shows where it hung.
    faulthandler.enable()
    code = main()
    if code == Exit.INTERRUPTED:
        # An upload that was canceled lives on in threads that the interpreter would wait for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # An interpreter that has imported torch would spend 0.6 s on a last garbage collection.
    gc.freeze()
    sys.exit(code)
