"""`python -m sizing COMMAND`: what a run needs and costs, before a cent is spent.

Each command is sizing/cli/COMMAND_command.py with HELP, add_arguments(parser) and run(arguments).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("catalogue", "plan", "model", "advise", "select", "accuracy")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser: every command with its own options."""
    parser = argparse.ArgumentParser(
        prog="python -m sizing", description="What a run needs and costs, before a cent is spent."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"sizing.cli.{name}_command")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one sentence on standard error and exit code 2."""
    chosen = make_parser().parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except BrokenPipeError:  # `| head` closed the pipe; drop what is still unflushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename:
            why = f"{error.filename}: {error.strerror}; check the path and its permissions"
        print(f"error: {why}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
