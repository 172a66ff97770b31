"""The examples of a document: commands behind `$ `, the lines that they print, files they need."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"
PAGES = (_DOCS / "your-program.md", _DOCS / "trainer.md")
_BLOCK = re.compile(r"^```(?P<kind>console|python)(?P<name>[^\n]*)\n(?P<text>.*?)^```", re.M | re.S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One command of the trainer, or a script, with the lines that it prints."""

    arguments: tuple[str, ...]  # those of `python -m training`; a script's after its name
    script: str = ""
    code: int
    output: str


def examples(text: str) -> Iterator[Example]:
    """Every command of the document's console blocks; `# exit N` behind it is its exit code."""
    for block in _BLOCK.finditer(text):
        if block["kind"] != "console":
            continue
        for part in re.split(r"^\$ ", block["text"].replace("\\\n", " "), flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            command, _, code = command.partition("# exit ")
            words = shlex.split(command)
            assert words[0] == "python", command
            is_script = words[1:3] != ["-m", "training"]
            assert not is_script or words[1].endswith(".py"), command
            yield Example(
                arguments=tuple(words[2 if is_script else 3 :]),
                script=words[1] if is_script else "",
                code=int(code or 0),
                output=output,
            )


def files(text: str) -> Iterator[tuple[str, str]]:
    """Name and content of the document's python blocks that have a file name."""
    for block in _BLOCK.finditer(text):
        if block["kind"] == "python" and block["name"].strip():
            yield block["name"].strip(), block["text"]


def own_workload(folder: Path, *more: str, name: str = "moons.py") -> Path:
    """A source folder with a workload of these pages, and `more` lines at its end."""
    folder.mkdir(parents=True)
    of_pages = dict(each for page in PAGES for each in files(page.read_text()))
    (folder / name).write_text("\n".join([of_pages[name], *more]))
    return folder


def matches(pattern: str, output: str) -> bool:
    """Whether the output matches the pattern, in which `…` stands for anything, even lines."""
    parts = (re.escape(part) for part in pattern.strip().split("…"))
    return re.fullmatch("(?s:.*?)".join(parts), output.strip()) is not None


def read(path: Path) -> list[Example]:
    """The examples of one document."""
    return list(examples(path.read_text()))
