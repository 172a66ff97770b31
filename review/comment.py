"""The Markdown comment: what a reviewer must know first, then the CLI's diff, folded."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from review.assembly import StackSide
from review.changes import Change, Effect
from review.costs import LEFT_OUT
from review.run_effects import read_run_env
from review.spelling import short
from review.verdict import HEADINGS, Review, headline

# GitHub's limit for a comment; the workflow finds its own comment by the marker.
MAX_CHARACTERS = 65_536
MARKER = "<!-- training-stack review -->"
# The workflow adds a line on the tests and one on credentials that failed.
_RESERVED_FOR_THE_WORKFLOW = 300
_MAX_ROWS = 60
# Shown elsewhere in the comment, or noise in a table.
_NOT_IN_TABLE = re.compile(
    r"UserData|PolicyDocument|KeyPolicy|TagSpecifications|(^|\.)Tags\.|\.Overrides\.|DashboardBody"
)


def write_comment(review: Review, limit: int = MAX_CHARACTERS - _RESERVED_FOR_THE_WORKFLOW) -> str:
    """Return the comment, never longer than `limit` characters."""
    top = "\n".join(_top(review))
    space = limit - len(top) - 1000
    if space < 0:
        note = "\n\n_Truncated: the rest exceeds the limit of a comment; see `make review`._\n"
        return top[: limit - len(note)].rpartition("\n")[0] + note
    return "\n".join([top, *_folded_diffs(review, space)])


def write_refusal(reason: str) -> str:
    """Return the comment that says why there is no review."""
    return f"{MARKER}\n## This change could not be reviewed\n\n````\n{reason[:8000]}\n````"


def _top(review: Review) -> Iterable[str]:
    yield MARKER
    yield f"## What this change does to what is deployed\n\n{headline(review.effects)}\n"
    yield f"`{review.head}` against `{review.base}`.\n"
    yield from (f"- {note}" for note in review.notes)
    for kind, head in HEADINGS.items():
        # What is only added or changed is in the last table and in the diff.
        found = [each for each in review.of(kind) if each.action not in ("added", "changed")]
        if found or kind == "run":
            yield f"\n### {head}\n"
            yield from _items(found)
        if kind == "run" and not found:
            idle = ("widens", "added", "changed")
            kinds = {each.kind for each in review.effects if each.action not in idle}
            above = [head for kind, head in HEADINGS.items() if kind in kinds]
            yield f"See {', '.join(above)}." if above else "Not affected."
    yield from _costs(review)
    rows = list(_difference_rows(review.changes))
    if rows:
        yield "\n### What changes\n"
        yield from _table(("resource", "property", "before", "after"), rows)


def _items(found: Sequence[Effect]) -> Iterable[str]:
    """Yield one item for each thing said, with all resources of which it is said."""
    places: dict[Effect, list[str]] = {}
    for each in found:
        where = [_code(f"{each.stack}/{each.path}".strip("/"))] if each.stack else []
        places.setdefault(replace(each, stack="", path=""), []).extend(where)
    for each, paths in places.items():
        what = _code(each.what) if each.kind == "security" else each.what.replace("<", "&lt;")
        place = f"**{', '.join(paths)}**: " if paths else ""
        instead = f". Instead: {each.instead}." if each.instead else ""
        accept = f" To accept it: `--accept {each.accept}`." if each.accept else ""
        yield f"- {f'{each.action} ' if each.action else ''}{place}{what}{instead}{accept}"


def _costs(review: Review) -> Iterable[str]:
    yield "\n### Cost and run time\n"
    shown = [row for row in review.costs if row.difference or row.is_headline]
    cells = ((it.name, _cell(it.before), _cell(it.after), _cell(it.difference)) for it in shown)
    yield from _table(("", "before", "after", ""), cells)
    if not any(row.difference for row in review.costs):
        yield "\nNone of this changes."
    yield f"\n<sub>{review.prices}. Not included: {LEFT_OUT}.</sub>"
    yield from (f"\n**Warning from the plan:** {_cell(warning)}" for warning in review.warnings)


def _difference_rows(changes: Sequence[Change]) -> Iterable[tuple[str, str, str, str]]:
    for change in changes:
        if change.action in ("added", "removed"):
            continue
        name = _code(f"{change.stack}/{change.path}")
        for path, before, after in change.differences():
            if not _NOT_IN_TABLE.search(path):
                yield name, _code(path), _code(short(before)), _code(short(after))
        if change.type == "AWS::EC2::LaunchTemplate":
            old, new = (
                read_run_env(StackSide(template={"Resources": {"It": side}})) if side else {}
                for side in (change.old, change.new)
            )
            for variable in dict.fromkeys([*old, *new]):
                if old.get(variable) != new.get(variable):
                    before, after = (short(each.get(variable)) for each in (old, new))
                    yield name, _code(f"run.env {variable}"), _code(before), _code(after)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    listed = list(rows)
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in listed[:_MAX_ROWS]:
        yield f"| {' | '.join(row)} |"
    if len(listed) > _MAX_ROWS:
        yield f"\n_{len(listed) - _MAX_ROWS} more rows: see the diff below._"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


def _folded_diffs(review: Review, space: int) -> Iterable[str]:
    """Yield the CLI's diffs within `space` characters, shared among them."""
    shown = [diff for diff in review.diffs if diff.text]
    for index, diff in enumerate(shown):
        share = space // (len(shown) - index)
        text, left_out = _cut(diff.text, share - 400)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        block = f"\n<details><summary>cdk diff {diff.stack}</summary>\n\n{fence}\n{text}\n{fence}\n"
        if left_out:
            block += (
                f"\n_Truncated: {left_out} more lines; a comment has at most {MAX_CHARACTERS} "
                "characters. In full: `make review BASE=<base>`._\n"
            )
        block += "\n</details>"
        space -= len(block)
        yield block


def _cut(text: str, space: int) -> tuple[str, int]:
    """Return as many whole lines as fit, and how many do not."""
    if len(text) <= space:
        return text, 0
    kept = text[: max(0, space)].rpartition("\n")[0]
    return kept, text.count("\n") - kept.count("\n")
