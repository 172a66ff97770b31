"""The code bundle: the folders that run on an instance, as one zip that it fetches at boot.

It includes the wheels that an image may lack, so that no boot needs a package index. `make setup`
leaves them in the virtual environment; only those that the machine's and the workload's
requirements pin are taken.
"""

import glob
import hashlib
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

FOLDERS = ("contract", "training", "userdata")
# Files that do not run on an instance.
EXCLUDED = shutil.ignore_patterns("__pycache__", "*.pyc", "tests", ".*", "*.md")
EXCLUDED_FOLDERS = ("training/proof",)
REQUIREMENTS = "userdata/requirements.txt"
FAST_HASH = "userdata/requirements-xxhash.txt"
WHEELS = "userdata/wheels"


class CodeBundle(s3_assets.Asset):
    """An asset of these folders of `root`, whose hash depends on their content alone.

    With the folder `wheels` it includes the pinned packages, also those of `workload`, but not
    `packages_without_wheel`. `add` writes anything else into the asset's folder.
    """

    packages_without_wheel: list[str]

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        root: Path,
        wheels: Path | None = None,
        workload: str = "",
        add: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        own = [
            *root.glob(FAST_HASH),
            *sorted(root.glob(f"userdata/requirements-{glob.escape(workload)}/*.txt")),
        ]
        pinned = _pinned_wheels([root / REQUIREMENTS, *own], wheels) if wheels else {}
        with tempfile.TemporaryDirectory(prefix="bundle-") as folder:
            for name in FOLDERS:
                shutil.copytree(root / name, Path(folder, name), ignore=EXCLUDED)
            for name in EXCLUDED_FOLDERS:
                shutil.rmtree(Path(folder, name), ignore_errors=True)
            for path in itertools.chain.from_iterable(pinned.values()):
                Path(folder, WHEELS).mkdir(exist_ok=True)
                shutil.copy(path, Path(folder, WHEELS))
            add(Path(folder))
            super().__init__(scope, construct_id, path=folder)
        self.packages_without_wheel = [name for name, paths in pinned.items() if not paths]


def _pinned_wheels(requirements: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """Return each pinned package's wheels in `folder`, matched by hash and not by name."""
    hashed = {
        hashlib.sha256(path.read_bytes()).hexdigest(): path for path in sorted(folder.glob("*.whl"))
    }
    text = "\n".join(path.read_text(encoding="utf-8") for path in requirements)
    pins = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    found: dict[str, list[Path]] = {}
    for pin in pins:
        if "==" in pin.partition("\n")[0]:
            hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", pin)
            found[pin.partition("==")[0]] = [hashed[each] for each in hashes if each in hashed]
    return found
