"""The code bundle: the folders that run on an instance, as one zip that it fetches at boot."""

from __future__ import annotations

from pathlib import Path

from aws_cdk import IgnoreMode
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

FOLDERS = ("contract", "training", "userdata")
# In the order of a .gitignore: nothing but these folders, and of these only what runs.
EXCLUDED = (
    "/*",
    *(f"!/{folder}" for folder in FOLDERS),
    "__pycache__",
    "*.pyc",
    "tests",
    ".*",
    "*.md",
)


class CodeBundle(s3_assets.Asset):
    """These folders of `root`; its hash changes with their content and with nothing else."""

    def __init__(self, scope: Construct, construct_id: str, *, root: Path) -> None:
        super().__init__(
            scope,
            construct_id,
            path=str(root),
            exclude=list(EXCLUDED),
            ignore_mode=IgnoreMode.GIT,
        )
