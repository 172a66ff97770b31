"""`python -m benchmarks COMMAND`: measure, then print a table with the command and the machine."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

# By command: what it measures, and the module with `add_arguments`, `measure`, which returns rows,
# and `is_damaged`, which judges them. Only the requested module is imported, as a machine with a
# GPU may lack what the others need.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "gpu": ("everything that needs a GPU, in one call", "benchmarks.gpu.table"),
    "kill_table": (
        "public trainers and save habits, killed on purpose",
        "benchmarks.kills.kill_table",
    ),
}


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (what, where) in COMMANDS.items():
        command = commands.add_parser(
            name, help=what, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in words[:1]:
            module = import_module(where)
            command.description = module.__doc__
            module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run one benchmark and print what it measured."""
    arguments = parse_arguments(sys.argv[1:] if words is None else words)
    module = import_module(COMMANDS[arguments.command][1])
    try:
        rows = module.measure(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    else:
        _show(rows, title=f"{arguments.command} ({machine()})")
    return int(module.is_damaged(rows))


def _show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    try:
        from sizing import show_table
    except ModuleNotFoundError:  # rich
        print(title, *(" | ".join(map(str, row.values())) for row in rows), sep="\n")
    else:
        show_table(rows, title=title)


def machine() -> str:
    """Describe the machine in one line, for the log."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical CPUs"


if __name__ == "__main__":
    sys.exit(main())
