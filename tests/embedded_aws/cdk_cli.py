"""The real CDK CLI with the variables that the embedded AWS prints."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from embedded_aws import EmbeddedAws

REPOSITORY = Path(__file__).parents[2]
CDK = REPOSITORY / "node_modules/.bin/cdk"
needs_cdk = pytest.mark.skipif(not CDK.exists(), reason="needs the CDK CLI, which Node runs")
NEVER = ("--require-approval", "never")


class Cli:
    """Runs what `npx cdk` runs with the variables that the embedded AWS prints."""

    def __init__(self, aws: EmbeddedAws, folder: Path) -> None:
        self.aws = aws
        self.folder = folder

    def run(self, *arguments: str, app: bool = True, fails: bool = False) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        where = ("--app", str(self.folder)) if app else ("--output", str(self.folder))
        done = subprocess.run(
            [CDK, *arguments, *where, "--ci", "--no-color"],
            cwd=REPOSITORY,
            env={**kept, **self.aws.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout
        return done.stdout

    def write(self, stacks: Mapping[str, Any], **needs: str) -> None:
        """A cloud assembly by hand: what synth would write, without its ten seconds."""
        artifacts = {}
        for name, template in stacks.items():
            (self.folder / f"{name}.json").write_text(json.dumps(template))
            artifacts[name] = {
                "type": "aws:cloudformation:stack",
                "environment": "aws://unknown-account/unknown-region",
                "properties": {"templateFile": f"{name}.json"},
                "dependencies": [needs[name]] if name in needs else [],
            }
        manifest = {"version": "36.0.0", "artifacts": artifacts}
        (self.folder / "manifest.json").write_text(json.dumps(manifest))
