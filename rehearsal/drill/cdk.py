"""Run the pinned CDK CLI as a program of the rehearsal, and tell what is new in its output."""

import re
import time

from rehearsal.drill.children import Children


def run_cdk(children: Children, name: str, *arguments: str) -> None:
    """Run one CLI command to its end; ChildFailed with its last lines if it fails."""
    children.say(f"{name} ...")
    started = time.monotonic()
    command = ["npx", "--no-install", "cdk", *arguments, "--ci", "--no-color"]
    children.start(name, command, told=_is_news).expect()
    children.say(f"{name}: {time.monotonic() - started:.1f} s")


def _is_news(line: str) -> bool:
    """Whether a line tells something new: each resource once, when it is there."""
    return not re.search(r"IN_PROGRESS|npm warn|^Trusted|^Using default|Stack ARN|^arn:", line)
