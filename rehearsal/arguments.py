"""The command line of `python -m rehearsal`: each command with its options."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from contract.grammar import argument_type, parse_positive, parse_positive_count
from contract.trainer_options import RANKS
from rehearsal.demo.action import SYNTAX, Action, parse_interruption
from rehearsal.demo.workload import PROGRAM_INTERRUPTIONS, by_workload
from rehearsal.drills.drill import NSPAWN, PROCESS

ABOUT = "Rehearse on a laptop: the demo, the drills, every alarm, or the embedded AWS alone."


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m rehearsal", description=ABOUT)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="deploy, train, interrupt, resume, finish, prove"))
    drill = commands.add_parser("drill", help="rehearse what can go wrong, each to its end")
    drill.add_argument(
        "names", nargs="*", metavar="NAME", help="a drill of --list, or a .toml file; default: all"
    )
    _add_machine(drill)
    drill.add_argument("--list", action="store_true", help="show the drills and run none")
    drill.add_argument("--out", type=Path, default=Path("out/drill"), help="default: %(default)s")
    drill.add_argument("--json", action="store_true", help="print the table as JSON")
    many = commands.add_parser("many", help="many runs side by side, a third of them interrupted")
    many.add_argument("--runs", type=int, default=20, help="stacks, default: %(default)s")
    many.add_argument(
        "--at-once", type=int, default=os.cpu_count(), help="machines, default: one per core"
    )
    many.add_argument("--out", type=Path, default=Path("out/many"), help="default: %(default)s")
    many.add_argument("--json", action="store_true", help="print the table as JSON")
    many.set_defaults(machine=PROCESS)
    aws = commands.add_parser("aws", help="start the embedded AWS, bootstrapped, until Ctrl-C")
    aws.add_argument(
        "--port", type=int, default=5566, help="0 for a free one, default: %(default)s"
    )
    grants = commands.add_parser(
        "grants", help="print every IAM statement with the rehearsals that used it, in Markdown"
    )
    grants.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="rehearsals' --out")
    alarms = commands.add_parser("alarms", help="try every alarm on its fault and on healthy runs")
    alarms.add_argument(
        "--template", type=Path, help="the stack's template; by default cdk synth writes one"
    )
    alarms.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser.parse_args(arguments)


def _add_machine(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--machine",
        choices=(PROCESS, NSPAWN),
        default=PROCESS,
        help="machines: processes, or containers with systemd and cloud-init (Linux, root); "
        "default: %(default)s",
    )


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--out", type=Path, default=Path("out/demo"), help="default: %(default)s")
    _add_machine(demo)
    demo.add_argument(
        "--hosts",
        type=int,
        choices=RANKS,
        default=1,
        help="run one SageMaker training job on this many instances instead of the fleet",
    )
    demo.add_argument("--size", default="g5.xlarge", help="instance type, default: %(default)s")
    demo.add_argument(
        "--program", type=Path, metavar="FOLDER", help="train this program instead of a workload"
    )
    demo.add_argument(
        "--workload",
        default="trajectory",
        help="a known name, or your own as package.module:NAME; default: %(default)s",
    )
    demo.add_argument(
        "--source", type=Path, metavar="FOLDER", help="folder with your own workload's module"
    )
    demo.add_argument("--data", type=Path, metavar="FOLDER", help="data for your own workload")
    demo.add_argument("--recipe", default="laptop", help="default: %(default)s")
    demo.add_argument("--overrides", default="", help='recipe fields, "epochs=2 width=64"')
    demo.add_argument(
        "--count",
        type=argument_type(parse_positive_count),
        help=f"samples to make; {by_workload('count')}",
    )
    demo.add_argument("--checkpoint-interval", help=by_workload("checkpoint_interval"))
    demo.add_argument(
        "--notice-seconds",
        type=argument_type(parse_positive),
        help="from the notice to SIGKILL (EC2: 120); default: 15, and more on a busy machine",
    )
    demo.add_argument(
        "--interrupt",
        type=_interruption_argument,
        action="append",
        metavar="WHEN",
        help=f"{SYNTAX}; repeat in order; {by_workload('interruptions')}, "
        f"{' '.join(PROGRAM_INTERRUPTIONS)} for a program, in the last stage of your own workload",
    )
    demo.add_argument("--no-interruptions", action="store_true", help="do not interrupt the run")
    demo.add_argument("--json", action="store_true", help="print the receipt as JSON")


def _interruption_argument(text: str) -> Action:
    try:
        return parse_interruption(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
