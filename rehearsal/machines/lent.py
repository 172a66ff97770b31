"""A Python environment that lends another's packages, all but some.

The packages are links; programs keep the interpreter of the environment that they come from.
"""

import sys
from collections.abc import Collection
from pathlib import Path


def lend_environment(source: Path, target: Path, lacking: Collection[str]) -> None:
    """Make `target` an environment like `source` without the packages `lacking`."""
    packages = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
    (target / packages).mkdir(parents=True)
    (target / "bin").mkdir()
    # The interpreter finds its packages by the folder that it was started in.
    (target / "pyvenv.cfg").symlink_to(source / "pyvenv.cfg")
    for program in (source / "bin").iterdir():
        (target / "bin" / program.name).symlink_to(program)
    for entry in (source / packages).iterdir():
        if not _belongs_to(entry.name, lacking):
            (target / packages / entry.name).symlink_to(entry)


def _belongs_to(entry: str, packages: Collection[str]) -> bool:
    """Whether a name in site-packages is a package or its metadata: boto3, boto3-1.2.dist-info."""
    return entry.partition("-")[0].lower() in packages
