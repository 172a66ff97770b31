"""The code bundle: the folders that run on an instance, as one zip that it fetches at boot."""

from pathlib import Path

from aws_cdk import IgnoreMode
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

FOLDERS = ("contract", "training", "userdata")
# Like a .gitignore: first everything, then back in these folders without what does not run.
EXCLUDED = (
    "/*",
    *(f"!/{folder}" for folder in FOLDERS),
    "/training/proof",
    "__pycache__",
    "*.pyc",
    "tests",
    ".*",
    "*.md",
)


class CodeBundle(s3_assets.Asset):
    """These folders of `root` as an asset, whose hash depends on their content alone."""

    def __init__(self, scope: Construct, construct_id: str, *, root: Path) -> None:
        super().__init__(
            scope,
            construct_id,
            path=str(root),
            exclude=list(EXCLUDED),
            ignore_mode=IgnoreMode.GIT,
        )
