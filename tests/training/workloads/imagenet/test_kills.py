"""An import that is killed at random ends as one that never was, and packs nothing finished twice.

python -m pytest tests/training/workloads/imagenet/test_kills.py -m slow    (20 kills of each kind)
"""

import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.training.workloads.imagenet.photographs import fill

REPOSITORY = Path(__file__).parents[4]


def start(source: Path, out: Path, kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.training.workloads.imagenet.pack_alone",
            str(source),
            str(out),
            kind,
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(source: Path, out: Path, kind: str) -> None:
    process = start(source, out, kind)
    _, said = process.communicate()
    assert process.returncode == 0, said


def kill_at_random(source: Path, out: Path, kind: str, chance: random.Random) -> bool:
    """Kill an import after some of its shards; return whether it had not ended by itself."""
    process = start(source, out, kind)
    assert process.stdout is not None
    for _ in range(chance.randrange(6)):
        process.stdout.readline()
    time.sleep(chance.random() * 0.02)
    process.kill()
    process.communicate()
    return process.returncode < 0


def shards(out: Path) -> Mapping[str, tuple[int, int]]:
    """Finished shards, and what changes if one is written again."""
    found = {}
    for record in (out / ".packed").glob("*.tar.json"):
        name = record.name.removesuffix(".json")
        stat = (out / name).stat()
        found[name] = (stat.st_ino, stat.st_mtime_ns)
    return found


def check(tmp_path: Path, kind: str, num_kills: int, count: int) -> None:
    source, out, whole = fill(tmp_path / "own", count), tmp_path / "a/out", tmp_path / "b/out"
    out.mkdir(parents=True)
    whole.mkdir(parents=True)
    finish(source, whole, kind)
    chance, kills, written = random.Random(16), 0, 0
    before: Mapping[str, tuple[int, int]] = {}
    while kills < num_kills:
        assert kill_at_random(source, out, kind, chance), "it ended before enough kills: bring more"
        kills += 1
        now = shards(out)
        assert {name: now.get(name) for name in before} == before, "packed twice"
        written += len(now) - len(before)
        before = now
    finish(source, out, kind)
    files = {
        path.relative_to(whole): path.read_bytes()
        for path in whole.rglob("[!.]*.*")
        if path.is_file()
    }
    assert {
        path.relative_to(out): path.read_bytes() for path in out.rglob("[!.]*.*") if path.is_file()
    } == files
    after = {name: ((out / name).stat().st_ino, (out / name).stat().st_mtime_ns) for name in before}
    assert after == before
    assert written > num_kills // 2, "the kills came too early to show anything"


@pytest.mark.parametrize("kind", ["folder"])
def test_two_kills(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, num_kills=2, count=90)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "store"])
def test_twenty_kills(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, num_kills=20, count=900)
