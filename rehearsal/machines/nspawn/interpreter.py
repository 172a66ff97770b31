"""The Python that a virtual environment was made with: what of it a machine needs to see."""

import os
import sys
from pathlib import Path


def interpreter_files(environment: Path, base: Path = Path(sys.base_prefix)) -> list[Path]:
    """Return the program under each name that leads to it, its library and its modules.

    Never the whole of `base`, which may be /usr or /usr/local: the machine has its own.
    """
    programs = []
    link = environment / "bin/python"
    while link.is_symlink():
        link = Path(os.path.normpath(link.parent / link.readlink()))
        if not link.is_relative_to(environment):
            programs.append(link)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [*programs, base / "lib" / version, *sorted(base.glob(f"lib/lib{version}*.so*"))]
