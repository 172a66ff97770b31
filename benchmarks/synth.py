"""Seconds of `cdk synth` of our app, beside a plain-Node app that makes the same resources.

The Node app includes our synthesized templates with CfnInclude, so it builds the same resources as
typed L1 constructs without the Python bridge; it does none of the L2 work, so it is a lower bound.
Its aws-cdk-lib is the Python package's: the same version, and nothing to download.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
FOLDER = REPOSITORY / "out" / "benchmarks" / "synth"
PEER = Path(__file__).with_name("plain_node_app.js")
# Python package -> the npm package inside it.
NODE_PACKAGES = {
    "aws_cdk": "aws-cdk-lib",
    "aws_cdk.cloud_assembly_schema": "@aws-cdk/cloud-assembly-schema",
    "aws_cdk.asset_awscli_v1": "@aws-cdk/asset-awscli-v1",
    "aws_cdk.asset_node_proxy_agent_v6": "@aws-cdk/asset-node-proxy-agent-v6",
    "constructs": "constructs",
}


def measure(*, rounds: int) -> list[dict[str, Any]]:
    """Run both apps in turn; return one row each: seconds, and the ratio to plain Node."""
    if rounds < 1:
        raise ValueError(f"a benchmark needs at least one round, got {rounds}")
    ours, peer = _prepare()
    seconds: dict[str, list[float]] = {"ours (Python)": [], "plain Node, same resources": []}
    for _ in range(rounds):
        seconds["ours (Python)"].append(_time(ours))
        seconds["plain Node, same resources"].append(_time(peer))
    base = statistics.median(seconds["plain Node, same resources"])
    return [
        {
            "app": name,
            "median s": statistics.median(times),
            "min s": min(times),
            "max s": max(times),
            "x plain Node": statistics.median(times) / base,
        }
        for name, times in seconds.items()
    ]


def _prepare() -> tuple[list[str], list[str]]:
    """Unpack the Node library, synthesize our templates once, return both commands."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    modules = FOLDER / "node_modules"
    for package, name in NODE_PACKAGES.items():
        archives = resources.files(package) / "_jsii"
        archive = next(item for item in archives.iterdir() if item.name.endswith(".tgz"))
        with resources.as_file(archive) as path, tarfile.open(path) as tar:
            tar.extractall(FOLDER, filter="data")
        (FOLDER / "package").rename(_made(modules / name))
    templates = FOLDER / "templates"
    _run(_synth(f"{sys.executable} app.py", templates))
    os.environ["TEMPLATES"] = str(templates)
    shutil.copy(PEER, FOLDER / "app.js")
    return (
        _synth(f"{sys.executable} app.py", FOLDER / "ours.out"),
        _synth(f"node {FOLDER / 'app.js'}", FOLDER / "peer.out"),
    )


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _synth(app: str, output: Path) -> list[str]:
    return ["npx", "--no-install", "cdk", "synth", "-q", "--app", app, "--output", str(output)]


def _time(command: Sequence[str]) -> float:
    started = time.monotonic()
    _run(command)
    return time.monotonic() - started


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
