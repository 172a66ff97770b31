"""`python -m operate`, which is `runs` on the environment's PATH; see operate/command.py."""

import sys

from operate.command import main

if __name__ == "__main__":
    sys.exit(main())
