"""What README.md and docs/ say can be typed, followed and found, and adds up."""

import ast
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import boto3
import pytest
from botocore.validate import validate_parameters

from contract.trainer_options import OPTIONS
from review.assembly import read_assembly
from review.costs import cost_rows
from stacks.parameters.fields import KINDS

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
ROOMS = [
    path
    for path in REPOSITORY.iterdir()
    if path.is_dir() and path.name.isidentifier() and path.name not in ("node_modules", "out")
]
# With the README of each room and example.
PAGES = (
    REPOSITORY / "AGENTS.md",
    REPOSITORY / "README.md",
    *sorted({*DOCS.glob("*.md"), *(path for room in ROOMS for path in room.rglob("README.md"))}),
)
PATH = r"`([\w.-]+/[\w./-]*\.(?:py|sh|md|json|csv|toml|yml|example))[`:]"
every_page = pytest.mark.parametrize(
    "path", PAGES, ids=lambda path: path.relative_to(REPOSITORY).as_posix()
)


def page(name: str) -> str:
    """A page of docs/, each paragraph and list item on one line."""
    text = (DOCS / f"{name}.md").read_text()
    return re.sub(r"(?<=[^\n]) *\n {0,3}(?=\S)(?![-*+] |\d+\. |[|#>]|```|!\[)", " ", text)


def makes(text: str) -> set[str]:
    return set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", text, re.MULTILINE))


def modules(text: str) -> set[str]:
    return set(re.findall(r"python -m ([\w.]*\w)", text))


def commands(text: str) -> set[tuple[str, str]]:
    found = re.findall(r"python -m (training|sizing|rehearsal) ([a-z][a-z-]*)", text)
    return {(module, command) for module, command in found}


def options(text: str) -> set[str]:
    return set(re.findall(r"-c ([a-z_.]+)=", text))


@cache
def help_of(module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def anchors(path: Path) -> set[str]:
    """The names by which headings can be linked to, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    heads = (re.sub(r"[^\w\- ]", "", head.lower()) for head in re.findall(r"^#+ (.*)", text, re.M))
    return {head.replace(" ", "-") for head in heads}


@every_page
def test_every_command_exists(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert makes(text) - targets == set()
    assert [each for each in modules(text) if find_spec(each) is None] == []
    unknown = [
        f"{module} {command}"
        for module, command in sorted(commands(text))
        if not re.search(rf"\b{command}\b", help_of(module))
    ]
    assert unknown == []


@every_page
def test_prose_is_wrapped_at_100_columns(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    # Tables, commands and pictures are as long as they are.
    lines = [line for line in text.splitlines() if not re.match(r" *\||    |!\[", line)]
    assert [line for line in lines if len(line) > 100 and " " in line[:100].strip()] == []


@every_page
def test_every_link_leads_somewhere(path: Path) -> None:
    links = [each for each in re.findall(r"\]\(([^)\s]+)\)", path.read_text()) if "://" not in each]
    broken = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@every_page
def test_every_path_and_option_exists(path: Path) -> None:
    text = path.read_text()
    made_by_commands = ("out/", "runs/", "events/", "sizing/calibration.json")
    paths = [each for each in re.findall(PATH, text) if not each.startswith(made_by_commands)]
    roots = [REPOSITORY, path.parent]
    assert [each for each in paths if not any((root / each).exists() for root in roots)] == []
    known = {*KINDS, *(f"train.{option}" for option in OPTIONS)}
    given = [each for each in sorted(options(text)) if not each.startswith("tags.")]
    assert [each for each in given if each not in known] == []


def test_what_is_looked_for_on_the_pages_is_there() -> None:
    for name in ("deploy", "first-day-on-aws"):
        text = page(name)
        assert makes(text), name
        assert modules(text), name
        assert options(text), name
    assert ("training", "torture") in commands(page("how-it-works"))
    assert "training/durable/attempt/notice.py" in re.findall(PATH, page("spot"))


def test_the_readme_says_the_main_things_within_twenty_lines() -> None:
    top = (REPOSITORY / "README.md").read_text().splitlines()[:20]
    pictures = [line for line in top if line.startswith("![")]
    commands = [line.split("#")[0].strip() for line in top if line.startswith("    make ")]
    assert (len(pictures), commands) == (1, ["make demo", "make test"])


def test_the_index_has_one_line_for_each_page() -> None:
    listed = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\): .+[.]$", page("README"), re.MULTILINE)
    assert sorted([*listed, "README.md"]) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_glossary_has_at_most_twenty_three_words_with_a_sentence_each() -> None:
    entries = re.findall(r"^- \*\*(\w+)\*\*: (.+)$", page("glossary"), re.MULTILINE)
    assert 0 < len(entries) <= 23
    assert [word for word, text in entries if not re.fullmatch(r"[^.]+(\.\w+[^.]*)*\.", text)] == []


def ways() -> dict[str, list[tuple[str, str]]]:
    """The stations (file, function) of each way of docs/six-ways.md."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in page("six-ways").split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        lines = re.findall(r"^\d\. .*$", text, re.MULTILINE)
        stations = [re.match(r"\d\. `([\w./]+): ([\w.]+)` - .+\.$", line) for line in lines]
        assert all(stations), f"{title}: a station is `file: function` - what happens there."
        found[title] = [(station[1], station[2]) for station in stations if station]
    return found


def has(path: Path, name: str) -> bool:
    """Whether a file defines a function, a class, or a method Class.name."""
    if path.suffix == ".sh":
        return re.search(rf"^{name}\(\) {{", path.read_text(), re.MULTILINE) is not None
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part:
                body = node.body
                break
        else:
            return False
    return True


def test_each_of_the_six_ways_has_at_most_seven_stations_that_exist() -> None:
    found = ways()
    assert len(found) == 6
    assert {title: len(stations) for title, stations in found.items() if len(stations) > 7} == {}
    missing = [
        f"{file}: {name}"
        for stations in found.values()
        for file, name in stations
        if not (REPOSITORY / file).is_file() or not has(REPOSITORY / file, name)
    ]
    assert missing == []
    assert not has(REPOSITORY / "training/durable/record/lease.py", "Lease.no_such_method")


def test_the_cost_of_idling_is_what_the_review_says(tmp_path: Path) -> None:
    import app as cdk_app

    context = json.loads((REPOSITORY / "cdk.json").read_text())["context"]
    app = cdk_app.App(
        context=context, outdir=str(tmp_path), builtin_cloud_formation_validation=False
    )
    cdk_app.build(app)
    side = read_assembly(Path(app.synth().directory), "docs")
    figures = {row.name: float(row.after) for row in cost_rows(side, side) if "$" in row.name
               and row.after != "-" and not row.name.startswith("run")}  # fmt: skip
    text = page("costs")
    idle = figures["**a month with the fleet at zero**, $"]
    assert f"A month with the fleet at zero: ${idle:.2f}" in text, "python -m review HEAD"
    for market in ("Spot", "on demand"):
        hour = figures[f"**an hour of training, {market}**, $/h"]
        assert f"${hour:.2f} on {market.removeprefix('on ')}" in text, "python -m review HEAD"
    assert f"${idle:.2f} a month" in page("first-day-on-aws")


def test_fis_would_take_the_experiment_template() -> None:
    template = json.loads((REPOSITORY / "docs" / "fis-interruption.json").read_text())
    client = boto3.client(
        "fis", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y"
    )
    shape = client.meta.service_model.operation_model("CreateExperimentTemplate").input_shape
    validate_parameters(template, shape)
    (action,) = template["actions"].values()
    # The end comes after the rebalance recommendation and the two minutes of the notice.
    assert action["parameters"] == {"durationBeforeInterruption": "PT3M"}
    assert set(action["targets"].values()) <= template["targets"].keys()


def test_the_role_for_fis_is_one_json_document() -> None:
    (command,) = re.findall(r"^ {4}(aws iam create-role .*?)\n {4}aws", page("first-day-on-aws"),
                            re.MULTILINE | re.DOTALL)  # fmt: skip
    document = json.loads(shlex.split(command.replace("\\\n", " "))[-1])
    assert document["Statement"][0]["Principal"] == {"Service": "fis.amazonaws.com"}
