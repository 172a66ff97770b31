"""The import rules of pyproject.toml bite: an import planted against each of them is found."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
# Rule, by words of its name -> the file that breaks it, and the line that is planted there.
PLANTED = {
    "contract imports nobody": ("contract/notice.py", "import training.durable.errors"),
    "stacks reads training": ("stacks/fleet.py", "import training.durable.errors"),
    "sizing knows neither torch": ("sizing/figures.py", "import torch"),
    "training stands alone": ("training/durable/errors.py", "import sizing.figures"),
    "rehearsal boots the user data": ("rehearsal/demo/fleet.py", "import training.durable.errors"),
    "the embedded AWS serves any CDK app": ("embedded_aws/capacity.py", "import sizing.figures"),
    "review reads templates": ("review/costs.py", "import rehearsal.demo.fleet"),
    "only training/durable/store/s3.py imports boto3": (
        "training/durable/record/head.py",
        "import boto3",
    ),
    "the packages of training/": (
        "training/durable/save/publish.py",
        "import training.engine.loop",
    ),
    # A new file: a workload that no rule names is under them as well.
    "a workload imports the ground floor": (
        "training/workloads/moons.py",
        "import training.engine.loop",
    ),
    "a workload never imports another": (
        "training/workloads/moons.py",
        "import training.workloads.trajectory.model",
    ),
    "what recognizes a run": ("training/durable/record/metrics.py", "import torch"),
    "expansion stands on torch alone": (
        "training/workloads/expansion/layout.py",
        "import training.numerics",
    ),
    "the packages of sizing/": ("sizing/catalogue/sizes.py", "import sizing.plan.size_plan"),
    # A type import counts as any other.
    "no circles": (
        "sizing/plan/plan_inputs.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sizing.plan.size_plan",
    ),
}


def test_a_planted_import_breaks_each_rule(tmp_path: Path) -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    for package in settings["root_packages"]:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for name, line in PLANTED.values():
        path = tmp_path / name
        with path.open("a") as file:
            file.write(f"\n{line}\n")
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [linter, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    report = " ".join(done.stdout.partition("Broken contracts")[0].split())
    rules = re.findall(r"(.+?) ?(KEPT|BROKEN)", report)
    broken = [name for name, verdict in rules if verdict == "BROKEN"]
    assert [rule for rule in PLANTED if not any(rule in name for name in broken)] == []
