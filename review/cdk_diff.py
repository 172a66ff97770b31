"""The CDK CLI's view of one stack: its diff, and which changes it calls destructive."""

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from review.assembly import CannotReview

_DESTRUCTIVE = re.compile(
    r"^  (?P<stack>[\w-]+): .*?(?P<logical_id>\w+) (?P<impact>(?:will|may) be \w+)", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CdkDiff:
    """The output of `cdk diff`, and by logical id the changes that it calls destructive."""

    stack: str
    text: str
    destructive: Mapping[str, str]


def run_cdk_diff(
    repository: Path, head: Path, stack: str, base_template: Mapping[str, Any] | None
) -> CdkDiff:
    """Compare `stack` of the assembly `head` with a template, or with what is deployed (None)."""
    command = ["npx", "--no-install", "cdk", "diff", "--app", str(head), "--exclusively", stack]
    command += ["--fail-on", "destructive", "--no-color", "--ci", "--no-notices"]
    with tempfile.TemporaryDirectory(prefix="review-") as folder:
        if base_template is None:
            command += ["--method", "template"]
        else:
            file = Path(folder) / "base.template.json"
            file.write_text(json.dumps(base_template), encoding="utf-8")
            command += ["--template", str(file)]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    _, found, listed = done.stderr.partition("destructive change(s)")
    if done.returncode != 0 and not found:
        raise CannotReview(f"cdk diff of {stack} failed: {done.stderr.strip()[-600:]}")
    return CdkDiff(
        stack=stack,
        text=done.stdout.strip(),
        destructive={each["logical_id"]: each["impact"] for each in _DESTRUCTIVE.finditer(listed)},
    )
