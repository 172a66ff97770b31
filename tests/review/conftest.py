"""Sides to compare: the app, synthesized in this process and edited as a commit would."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from constructs import Construct

import app as cdk_app
from review.assembly import Side, read_assembly
from review.verdict import Review, judge
from tests.stack_names import TRAINING

REPOSITORY = Path(__file__).parents[2]
Edit = Callable[[Construct], None]
MakeSide = Callable[..., Side]


def git(folder: Path, *arguments: str) -> str:
    """Run git as nobody in particular; return what it prints."""
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.com"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def changed(side: Side, stack: str = TRAINING, **changes: Any) -> Side:
    """The same side with a plan, a template or an image of one stack changed."""
    return replace(side, stacks={**side.stacks, stack: replace(side.stacks[stack], **changes)})


def edited(side: Side, edit: Callable[[dict[str, Any]], object], stack: str = TRAINING) -> Side:
    """The same side after an edit of a template's resources."""
    template = json.loads(json.dumps(side.stacks[stack].template))
    edit(template["Resources"])
    return changed(side, stack, template=template)


def on_run(review: Review) -> list[str]:
    """The sentences about a run in progress, the most important first."""
    return [each.what for each in review.of("run")]


def cost(review: Review, name: str) -> tuple[str, str]:
    """One row of the costs, before and after."""
    (row,) = [row for row in review.costs if name in row.name]
    return row.before, row.after


@pytest.fixture(scope="session")
def make_side(tmp_path_factory: pytest.TempPathFactory) -> MakeSide:
    """Return a function that synthesizes the app with a context, after an edit of its tree."""

    @cache
    def make(edit: Edit | None = None, **context: object) -> Side:
        defaults = json.loads((REPOSITORY / "cdk.json").read_text(encoding="utf-8"))["context"]
        app = cdk_app.App(
            context={**defaults, **context, "aws:cdk:enable-path-metadata": True},
            outdir=str(tmp_path_factory.mktemp("cdk.out")),
            builtin_cloud_formation_validation=False,
        )
        cdk_app.build(app)
        if edit is not None:
            edit(app)
        folder = Path(app.synth().directory)
        (folder / "TrainingStack.plan.json").unlink(missing_ok=True)
        return read_assembly(folder, "a side")

    return make


@pytest.fixture(scope="session")
def base(make_side: MakeSide) -> Side:
    """The app with the defaults of cdk.json."""
    return make_side()


@pytest.fixture
def review_of(base: Side, make_side: MakeSide) -> Callable[..., Review]:
    """Return a function that reviews the app, edited, against itself with its defaults."""

    def review(edit: Edit | None = None, **context: Any) -> Review:
        return judge(base, make_side(edit, **context), [])

    return review
