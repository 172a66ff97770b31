"""`python -m review main`: review the working tree against the commit where it branched off main.

Run it in the folder of a CDK app: this one, or another app that imports these stacks.
The exit code is 1 on data loss or on the loss of a protection that is not accepted, 2 if there is
nothing to compare, 0 otherwise.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from contract.stack_names import refuse_foreign
from review.assembly import (
    CannotReview,
    Side,
    StackSide,
    base_checkout,
    deployed,
    head_name,
    merge_base,
    read_assembly,
    run_cdk_diff,
    synthesize,
)
from review.comment import write_comment, write_refusal
from review.protections import PROTECTIONS
from review.verdict import Review, judge


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m review", description=__doc__)
    add = parser.add_argument
    add("base", nargs="?", default="main", help="branch or commit, default: main")
    add("--deployed", action="store_true", help="compare with the deployed stacks, not with BASE")
    add("-c", "--context", action="append", default=[], metavar="NAME=VALUE", help="for both sides")
    add(
        "--fail-on",
        choices=("data-loss", "destructive", "never"),
        default="data-loss",
        help="what sets exit code 1; destructive: any replacement or removal",
    )
    add(
        "--accept",
        action="append",
        choices=PROTECTIONS,
        default=[],
        help="what may be lost: alarms, the Guard, IMDSv2 only, closed doors, narrow permissions, "
        "encryption, logs and old versions, machines that boot",
    )
    add("--json", action="store_true", help="print facts as JSON, not the comment")
    add("--output", type=Path, help="also write the comment to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, repository: Path | None = None) -> int:
    """Print the review of `repository`, by default the current folder; return the exit code."""
    repository = repository or Path.cwd()
    options = parse_arguments(arguments)
    try:
        if options.output is not None:  # fails before anything is synthesized
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.open("a").close()
    except OSError as error:
        why = f"--output {options.output} cannot be written ({error.strerror}); name another file"
        print(f"review: {why}", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="review-") as folder:
            review = _review(repository, Path(folder), options)
    except CannotReview as reason:
        print(f"review: {reason}", file=sys.stderr)
        _write(options.output, write_refusal(str(reason)))
        return 2
    comment = write_comment(review)
    _write(options.output, comment)
    exit_code = review.exit_code(options.fail_on, options.accept)
    facts = review.as_dict() | {"exit_code": exit_code}
    print(json.dumps(facts, indent=2, ensure_ascii=False) if options.json else comment)
    return exit_code


def _write(output: Path | None, comment: str) -> None:
    if output is not None:
        output.write_text(comment + "\n", encoding="utf-8")


def _review(repository: Path, folder: Path, options: argparse.Namespace) -> Review:
    name = head_name(repository)
    # A base that is not a commit is refused before anything is synthesized.
    commit = None if options.deployed else merge_base(repository, options.base)
    synthesize(repository, folder / "head", options.context, f"head ({name})")
    head = read_assembly(folder / "head", name)
    if commit is None:
        base = deployed(head)
        for stack, side in base.stacks.items():
            wanted = head.stacks[stack].template.get("Description")
            if why := refuse_foreign(stack, side.template.get("Description"), wanted):
                raise CannotReview(why)
        head = dataclasses.replace(head, stacks=_as_cloudformation_returns(head))
    else:
        base_name = f"{options.base} at {commit[:9]}"
        with base_checkout(repository, commit) as checkout:
            synthesize(checkout, folder / "base", options.context, f"base ({base_name})")
        base = read_assembly(folder / "base", base_name, head)
    diffs = [
        run_cdk_diff(
            repository,
            folder / "head",
            stack,
            head.stacks[stack].construct_id,
            None if commit is None else base.stacks[stack].template,
        )
        for stack in sorted(head.stacks)
        if stack in base.stacks
    ]
    return judge(base, head, diffs)


def _as_cloudformation_returns(head: Side) -> dict[str, StackSide]:
    """Replace non-ASCII characters: GetTemplate returns a question mark for each."""
    return {
        name: dataclasses.replace(
            stack,
            template=json.loads(
                json.dumps(stack.template, ensure_ascii=False).encode("ascii", "replace")
            ),
            nested={},  # those that are deployed cannot be read
        )
        for name, stack in head.stacks.items()
    }


if __name__ == "__main__":
    sys.exit(main())
