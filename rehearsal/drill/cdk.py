"""Runs the pinned CDK CLI and relays the news in its output."""

import re
import time

from rehearsal.drill.children import Children


def run_cdk(children: Children, name: str, *arguments: str) -> None:
    """Run one CLI command and wait for it; ChildFailed has its last lines."""
    children.say(f"{name} ...")
    started = time.monotonic()
    command = ["npx", "--no-install", "cdk", *arguments, "--ci", "--no-color"]
    children.start(name, command, relayed=_is_news).expect()
    children.say(f"{name}: {time.monotonic() - started:.1f} s")


def _is_news(line: str) -> bool:
    """Whether a line is worth relaying: of each resource one, when it is complete."""
    return not re.search(r"IN_PROGRESS|npm warn|^Trusted|^Using default|Stack ARN|^arn:", line)
