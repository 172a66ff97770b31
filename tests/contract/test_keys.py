"""Files that cannot import the names in S3 spell them as contract/keys.py does."""

import re
from pathlib import Path

from contract import keys

REPOSITORY = Path(__file__).parents[2]


def spelled(pattern: str, *paths: Path) -> set[str]:
    """The first part after the run's prefix: a file's name, or a folder with its slash."""
    found = {match for path in paths for match in re.findall(pattern, path.read_text())}
    assert found
    return found


def test_the_boot_scripts_name_them() -> None:
    scripts = sorted((REPOSITORY / "userdata").rglob("*.sh"))
    found = spelled(r"\$\{?(?:RUN_URI|DATASET_URI)(?::-)?\}?/([a-z.]+/?)", *scripts)
    assert found == {keys.HEAD, keys.CONFIG, keys.EVENTS, keys.BUNDLES, keys.MANIFEST}
    launcher = (REPOSITORY / "userdata" / "run_training.sh").read_text()
    assert f'"${{RUN_URI%/{keys.RUNS}*}}/{keys.ARTIFACTS[:-1]}"' in launcher
