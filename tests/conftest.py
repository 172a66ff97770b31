"""The tests call the virtual environment's own tools, whether it is activated or not."""

import os
import sys
from pathlib import Path

os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
