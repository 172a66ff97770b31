"""Every command, flag and stack parameter, one a line: what users type, frozen in a tracked file.

To write tests/command_line.txt: .venv/bin/python -m tests.test_command_line
"""

import argparse
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

REPOSITORY = Path(__file__).parent.parent
FROZEN = REPOSITORY / "tests" / "command_line.txt"


class Parsed(Exception):
    """Raised in place of parsing, with the parser."""


def modules() -> list[str]:
    """What users start with `python -m`."""
    found = [*REPOSITORY.glob("*/__main__.py"), *REPOSITORY.glob("stacks/*/__main__.py")]
    return sorted(".".join(path.relative_to(REPOSITORY).parent.parts) for path in found)


def parser_of(module: str, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser that a module makes for a command line that begins with these words."""

    def parse(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        raise Parsed(parser)

    with (
        mock.patch.object(sys, "argv", [module, *words]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
    ):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except Parsed as parsed:
            parser: argparse.ArgumentParser = parsed.args[0]
            return parser
    raise AssertionError(f"python -m {module} reads no command line")


def flags(parser: argparse.ArgumentParser, name: str, module: str = "") -> Iterator[str]:
    """The parser's own arguments, and those of its commands.

    With `module`, each command's parser is made by the module: it may add options only then.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (f"{name} {command}" for command in action.choices)
            for command, inner in action.choices.items():
                if module:
                    made = parser_of(module, [command])._actions
                    (outer,) = (one for one in made if isinstance(one, argparse._SubParsersAction))
                    inner = outer.choices[command]
                yield from flags(inner, f"{name} {command}")
        elif action.option_strings:
            yield from (f"{name} {flag}" for flag in action.option_strings if flag[:2] == "--")
        else:
            yield f"{name} {(action.metavar or action.dest)!s}"


def lines() -> list[str]:
    """The whole command line, sorted."""
    from contract.trainer_options import OPTIONS
    from stacks.parameters.fields import KINDS

    found = [f"cdk -c {name}" for name in (*KINDS, *(f"train.{option}" for option in OPTIONS))]
    for module in modules():
        found += flags(parser_of(module, []), module, module)
    return sorted(line for line in found if not line.endswith(" --help"))


def test_what_users_type_changes_only_with_the_frozen_list() -> None:
    # In a process of its own: it imports every command.
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.test_command_line import lines; print(*lines(), sep='\\n')",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    gone = sorted({*FROZEN.read_text().splitlines()} - {*done.stdout.splitlines()})
    new = sorted({*done.stdout.splitlines()} - {*FROZEN.read_text().splitlines()})
    assert (gone, new) == ([], []), (
        "commands or flags are gone, or new; if that is meant, run "
        "`.venv/bin/python -m tests.test_command_line` and commit tests/command_line.txt"
    )


if __name__ == "__main__":
    FROZEN.write_text("\n".join(lines()) + "\n", encoding="utf-8")
