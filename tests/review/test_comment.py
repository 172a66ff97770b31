"""The comment: what matters on top, the diff folded, never longer than GitHub takes."""

from collections.abc import Callable

from aws_cdk import aws_s3 as s3
from constructs import Construct

from review.assembly import CdkDiff, Side
from review.comment import MARKER, MAX_CHARACTERS, write_comment
from review.verdict import Review, judge
from tests.review.conftest import changed
from tests.stack_names import DATASET, TRAINING


def give_a_name(app: Construct) -> None:
    bucket = app.node.find_child("DatasetStack").node.find_child("RunBucket").node.default_child
    assert isinstance(bucket, s3.CfnBucket)
    bucket.bucket_name = "my-runs"


def test_the_worst_stands_first(review_of: Callable[..., Review]) -> None:
    comment = write_comment(review_of(give_a_name, size="g5.4xlarge"))
    assert comment.startswith(MARKER)
    assert "**Data loss: 1.**" in comment
    heads = [line for line in comment.splitlines() if line.startswith("###")]
    assert heads == [
        "### Data loss",
        "### A deploy would fail",
        "### What keeps data",
        "### Resources",
        "### A run in progress",
        "### Cost and run time",
        "### What changes",
    ]


def test_run_env_is_compared_variable_by_variable(review_of: Callable[..., Review]) -> None:
    comment = write_comment(review_of(notice_budget_seconds=90))
    assert "| `run.env NOTICE_BUDGET_SECONDS` | `120` | `90` |" in comment
    assert "UserData" not in comment


def test_a_long_diff_is_cut_between_lines_and_says_so(base: Side) -> None:
    lines = [f"[~] line {number} `with` ``` a fence" for number in range(9000)]
    diffs = [CdkDiff(stack=name, text="\n".join(lines), destructive={})
             for name in (DATASET, TRAINING)]  # fmt: skip
    comment = write_comment(judge(base, base, diffs))
    assert 0.8 * MAX_CHARACTERS < len(comment) <= MAX_CHARACTERS
    assert comment.count("<details>") == comment.count("</details>") == 2
    assert comment.count("_Truncated:") == 2
    # The fence is longer than any run of backticks in what it holds.
    assert comment.count("\n````\n") == 4


def test_a_long_top_is_cut_too(review_of: Callable[..., Review]) -> None:
    comment = write_comment(review_of(give_a_name), limit=1500)
    assert len(comment) <= 1500
    assert "**Data loss: 1.**" in comment
    assert "_Truncated" in comment


def test_a_pipe_does_not_break_the_table(base: Side) -> None:
    plan = {"bound_by": "loader | disk <b>", "warnings": ["a | b"]}
    comment = write_comment(
        judge(changed(base, plan={"bound_by": "GPU"}), changed(base, plan=plan), [])
    )
    assert "| loader \\| disk &lt;b> |" in comment
    assert "**Warning from the plan:** a \\| b" in comment


def test_what_costs_the_same_is_told_by_its_totals(base: Side) -> None:
    comment = write_comment(judge(base, base, []))
    assert "None of this changes." in comment
    assert "a month with the fleet at zero" in comment
    assert "public IPv4" not in comment
