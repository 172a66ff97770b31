"""Rehearse on a laptop: the demo, the drills, every alarm, or the embedded AWS alone."""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from contract.cleared_folder import cleared_folder
from contract.description import describe
from contract.errors import Exit
from contract.grammar import argument_type, parse_positive, parse_positive_count
from contract.readable import shown
from contract.stack_names import training_stack
from contract.trainer_options import RANKS
from embedded_aws import EmbeddedAws, EventBus
from rehearsal.alarms.trial import AlarmTrial, trial_table, try_alarms
from rehearsal.demo.actions import SYNTAX, check_stages, parse_interruption
from rehearsal.demo.children import ChildFailed, Children, run_cdk
from rehearsal.demo.demo import GUARD_TICK_SECONDS, Demo, DemoLog, usual_seconds
from rehearsal.demo.deployment import (
    NOTICE_SECONDS,
    REPOSITORY,
    SWEEPS,
    DeployedStacks,
    child_environment,
    embedded_stacks,
    spot_usd,
)
from rehearsal.demo.fleet import KINDS, BootableMachine, Fleet, RehearsalFailed
from rehearsal.demo.grants import grants_page
from rehearsal.demo.hosts_demo import HostsDemo
from rehearsal.demo.receipt import find_faults
from rehearsal.demo.report import receipt_rows, show_receipt, verdict, write_report
from rehearsal.demo.trained import (
    DEFAULTS,
    PROGRAM_INTERRUPTIONS,
    PROGRAM_STAGES,
    RehearsedProgram,
    RehearsedWorkload,
    by_workload,
    find_data,
    own_defaults,
)
from rehearsal.drills.drill import NSPAWN, PROCESS, choose
from rehearsal.drills.many import MIXED, ManyRuns, many_table
from rehearsal.drills.series import DrillSeries, drill_table, outcome_table
from rehearsal.machines.commands import CommandFailed
from rehearsal.machines.metadata import RehearsedInstance
from rehearsal.machines.quirks import Quirks
from sizing import catalogue

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop(*_: object) -> None:
    # An impatient second Ctrl-C must not interrupt the clean-up after the first.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first of STOP_SIGNALS; restore the handlers on exit.

    Under nohup, which ignores SIGHUP, the end of the terminal stays ignored.
    """
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in STOP_SIGNALS if not (is_kept and number == signal.SIGHUP)]
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """Run one command; Ctrl-C, SIGTERM and a closed terminal leave nothing running."""
    arguments = parse_arguments()
    started = time.monotonic()
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            line = f"[{time.monotonic() - started:6.1f} s] {shown(text)}"
            print(line, file=sys.stderr, flush=True)

    commands = {
        "aws": serve,
        "alarms": show_alarms,
        "demo": rehearse,
        "drill": run_drills,
        "grants": show_grants,
        "many": run_many,
    }
    with stopped_by_signals():
        try:
            return commands[arguments.command](arguments, say)
        except KeyboardInterrupt:
            say("interrupted: everything that the rehearsal started has been stopped")
            return Exit.STOPPED
        except (RehearsalFailed, ChildFailed, CommandFailed, OSError, ValueError) as error:
            print(shown(f"rehearsal: {error}"), file=sys.stderr)
            return Exit.USER if isinstance(error, ValueError) else Exit.FAILED


def rehearse(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run the demo, write and show its receipt; fail if it breaks a promise."""
    trained, usual = _what_trains(arguments)
    plan = arguments.interrupt or [parse_interruption(text) for text in usual]
    plan = [] if arguments.no_interruptions else plan
    path = (REPOSITORY / arguments.out).resolve()
    log = DemoLog(say, path / "demo.log", usual_seconds(len(plan)))
    with _embedded(arguments, say, log.hear) as stacks:
        if arguments.hosts > 1:
            stacks = replace(stacks, training=SWEEPS)
        kind = HostsDemo if arguments.hosts > 1 else Demo
        demo = kind(trained=trained, plan=plan, options=arguments, stacks=stacks, log=log)
        receipt, curves = demo.rehearse()
        # A script that saves rarely may be done before its second usual interruption.
        least = min(1, len(plan)) if arguments.program and not arguments.interrupt else len(plan)
        faults = find_faults(receipt, max(receipt["interruptions"], least))
        receipt, rows = {"broken_promises": faults, **receipt}, receipt_rows(receipt)
        write_report(path / "report.html", receipt, curves, rows, faults)
    (path / "receipt.json").write_text(json.dumps(receipt, indent=2) + "\n")
    if arguments.json:
        print(json.dumps(receipt, indent=2))
    else:
        sentences = "\n- ".join([verdict(receipt, faults), *faults])
        show_receipt([("verdict", sentences), *rows], Console(width=min(Console().width, 120)))
    for fault in faults:
        print(shown(f"rehearsal: broken promise: {fault}"), file=sys.stderr)
    say(f"receipt: {path / 'receipt.json'}")
    say(f"report: {path / 'report.html'}")
    return 1 if faults else 0


def _what_trains(
    arguments: argparse.Namespace,
) -> tuple[RehearsedWorkload | RehearsedProgram, Sequence[str]]:
    """Return what to train, and its usual interruptions."""
    if not catalogue.find(arguments.size).is_trainable:
        raise ValueError(
            f"--size is {arguments.size}, on which no stack trains; the smallest is g4dn.xlarge"
        )
    if arguments.hosts > 1:
        if arguments.program is not None or arguments.machine == NSPAWN:
            raise ValueError(
                f"--hosts is {arguments.hosts}; the hosts of a job train a workload and do not "
                "boot: leave out --program and --machine"
            )
        gpus = catalogue.find(arguments.size).num_gpus
        if (ranks := arguments.hosts * gpus) not in RANKS:
            raise ValueError(
                f"--hosts is {arguments.hosts} and {arguments.size} has {gpus} GPUs; choose hosts "
                "and a size with 1, 2, 4 or 8 GPUs in total"
            )
        known = DEFAULTS.get(arguments.workload)
        if known is not None and "micro_batch=" not in arguments.overrides:
            if ranks > known.global_batch:
                raise ValueError(
                    f"--hosts is {arguments.hosts}; the demo of {arguments.workload} has "
                    f"{known.global_batch} samples a step, too few for {ranks} GPUs: use fewer "
                    "hosts, or set global_batch and micro_batch in --overrides"
                )
            arguments.overrides += f" micro_batch={known.global_batch // ranks}"
        workload, usual = _workload(arguments)
        return workload, [each for each in usual if each.startswith("notice")][:1]
    if arguments.program is not None:
        program = RehearsedProgram.from_folder(arguments.program, arguments.data)
        check_stages(arguments.interrupt or (), PROGRAM_STAGES)
        return program, PROGRAM_INTERRUPTIONS
    return _workload(arguments)


def _workload(arguments: argparse.Namespace) -> tuple[RehearsedWorkload, Sequence[str]]:
    """Return the workload to train, the user's own or a known one, and its usual interruptions."""
    name, source, data = arguments.workload, arguments.source, None
    if (source is None) == (":" in name):
        raise ValueError(
            f"--workload is {name!r} and --source {source}; pass both for a workload of your own "
            "(package.module:NAME and its folder), or only --workload for a known one"
        )
    if source is None and arguments.data is not None:
        raise ValueError(
            f"--data is {arguments.data}, but {name} rehearses on data that it makes; leave it out"
        )
    source = source and source.resolve()
    known = DEFAULTS.get(name)
    recipe = arguments.recipe or (known.recipe if known else "laptop")
    imports_data, defaults = True, known
    if known is None or arguments.interrupt or arguments.recipe or arguments.overrides:
        described = describe(name, recipe, arguments.overrides.split(), source=source)
        check_stages(arguments.interrupt or (), tuple(described.stages))
        defaults, imports_data = known or own_defaults(described), described.imports_data
        if source is not None and (arguments.data or not described.makes_data):
            data = find_data(source, arguments.data)
    assert defaults is not None
    workload = RehearsedWorkload(
        name=name,
        recipe=recipe,
        overrides=arguments.overrides,
        count=defaults.count if arguments.count is None else arguments.count,
        checkpoint_interval=arguments.checkpoint_interval or defaults.checkpoint_interval,
        source=source,
        data=data,
        data_options=defaults.data,
        imports_data=imports_data,
    )
    return workload, defaults.interruptions


def _embedded(
    arguments: argparse.Namespace,
    say: Callable[[str], None],
    output: Callable[[str], None] | None = None,
) -> AbstractContextManager[DeployedStacks]:
    is_nspawn = arguments.machine == NSPAWN
    return embedded_stacks(arguments.out, is_nspawn=is_nspawn, say=say, output=output)


def run_drills(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Rehearse the chosen drills; return 1 if one did not end as written."""
    kind = arguments.fleet
    drills = choose(arguments.names, "" if arguments.list else arguments.machine, kind)
    if arguments.list:
        records = [{"name": each.name, "about": each.about, "needs": each.needs} for each in drills]
        _show(arguments, records, drill_table(drills))
        return 0
    left_out = [each.name for each in choose([]) if not each.can_have(arguments.machine)]
    if left_out and not arguments.names:
        say(f"skipped, as {arguments.machine} machines cannot show them: {', '.join(left_out)}")
    outcomes, records = [], []
    with _embedded(arguments, say) as stacks:
        for outcome in DrillSeries(drills=drills, stacks=stacks, say=say, kind=kind).run():
            outcomes.append(outcome)
            # Write after each drill, so that Ctrl-C keeps the earlier ones.
            records = [asdict(each) for each in outcomes]
            (stacks.folder / "drills.json").write_text(json.dumps(records, indent=2) + "\n")
    _show(arguments, records, outcome_table(outcomes))
    return 1 if any(each.faults for each in outcomes) else 0


def _show(arguments: argparse.Namespace, document: object, table: Table) -> None:
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table)


def run_many(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Rehearse many runs in one account; return 1 if one of them breaks a promise."""
    if min(arguments.runs, arguments.at_once) < 1:
        given = f"--runs is {arguments.runs} and --at-once {arguments.at_once}"
        raise ValueError(f"{given}; use 1 or more of each")
    with _embedded(arguments, say) as stacks:
        runs = ManyRuns(
            stacks=stacks,
            say=say,
            count=arguments.runs,
            at_once=arguments.at_once,
            kinds=KINDS if arguments.fleet == MIXED else (arguments.fleet,),
        )
        outcomes, faults = runs.run()
        records = {"runs": [asdict(each) for each in outcomes], "faults": faults}
        (stacks.folder / "many.json").write_text(json.dumps(records, indent=2) + "\n")
    _show(arguments, records, many_table(outcomes))
    for fault in faults:
        print(shown(f"rehearsal: broken promise: {fault}"), file=sys.stderr)
    return 1 if faults or any(each.faults for each in outcomes) else 0


def serve(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Start the embedded AWS, bootstrap it, print its variables and wait for Ctrl-C."""
    with (
        EmbeddedAws(port=arguments.port, spot_usd=spot_usd) as aws,
        cleared_folder(REPOSITORY / "out/aws-local/now") as folder,
        Children(
            say=lambda _: None, environment=child_environment(aws), folder=REPOSITORY
        ) as children,
    ):
        say("bootstrapping the embedded AWS ...")
        stacks = DeployedStacks(folder=folder, aws=aws, children=children)
        stacks.bootstrap()
        variables = aws.exports()
        (file := REPOSITORY / "out/aws-local.env").unlink(missing_ok=True)
        file.touch(mode=0o600)  # it has the root user's key
        file.write_text(variables)
        print(variables, end="", flush=True)
        say("ready: type these lines in another terminal, or `source out/aws-local.env`; then cdk")
        say("and aws use the embedded AWS. Ctrl-C stops it and discards everything in it")
        while arguments.machines:
            _boot_machines(stacks, say)
        threading.Event().wait()
    return 0


def _boot_machines(stacks: DeployedStacks, say: Callable[[str], None]) -> None:
    """Boot the machines of the fleet that a person deploys, and tick its Guard, until it goes."""

    def found() -> dict[str, str]:
        return {
            str(each["StackName"]): str(output["OutputValue"])
            for each in stacks.aws.client("cloudformation").describe_stacks()["Stacks"]
            for output in each.get("Outputs", ())
            if output["OutputKey"] == "FleetIdOutput"
        }

    def boot(instance: RehearsedInstance) -> BootableMachine:
        return stacks.machine(instance, machines, NOTICE_SECONDS, Quirks())

    if not (fleets := found()):
        time.sleep(1.0)
        return
    stack, identifier = next(iter(fleets.items()))
    named = {stack}
    stacks.aws.capacity.notice_seconds = NOTICE_SECONDS
    machines = stacks.folder / "machines"
    bus = EventBus(aws=stacks.aws, code_folder=stacks.folder / "functions")
    fleet = Fleet(aws=stacks.aws, bus=bus, id=identifier, boot=boot, say=say, stack=stack)

    def is_gone() -> bool:
        # A deploy may replace the fleet, whose machines go on until they have saved.
        fleets = found()
        fleet.id = fleets.get(stack, "")
        if others := sorted({*fleets} - named):
            named.update(others)
            say(f"no machine boots for {', '.join(others)} before {stack} is destroyed")
        return not fleet.id

    say(f"{stack} has the fleet {identifier}; its machines are processes below {machines}")
    try:
        fleet.follow(
            is_gone,
            relay=say,
            tick_seconds=GUARD_TICK_SECONDS,
            timeout_seconds=math.inf,
            logs=machines,
        )
    finally:
        fleet.close()
        bus.close()


def show_alarms(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Print each alarm's fault and healthy runs; return 1 if an alarm fails its trial."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Children(say=lambda _: None, environment=dict(os.environ), folder=REPOSITORY) as children,
    ):
        say("cdk synth ...")
        run_cdk(children, "cdk synth", "synth", "--quiet", "--output", folder)
        trials = _try_alarms(Path(folder) / f"{training_stack()}.template.json")
    _show(arguments, [asdict(trial) for trial in trials], trial_table(trials))
    return 0 if all(trial.is_passed for trial in trials) else 1


def _try_alarms(path: Path) -> list[AlarmTrial]:
    """Try a template's alarms on a GPU that is as busy as the plan next to it expects at least."""
    template = json.loads(path.read_text(encoding="utf-8"))
    plan = path.with_name(path.name.replace(".template.", ".plan."))
    if not plan.exists():  # a program has none
        return try_alarms(template)
    figures = json.loads(plan.read_text(encoding="utf-8"))
    return try_alarms(template, figures["gpu_busy_percent"][0] * figures["gpu_share"])


def show_grants(arguments: argparse.Namespace, _say: Callable[[str], None]) -> int:
    """Print the table of grants; return 1 if a statement has neither a call nor a reason."""
    page, unexplained = grants_page(arguments.folders)
    print(page, end="")
    for each in unexplained:
        print(f"rehearsal: no call used {each}, and no reason is given for it", file=sys.stderr)
    return 1 if unexplained else 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m rehearsal", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="deploy, train, interrupt, resume, finish, prove"))
    drill = commands.add_parser("drill", help="rehearse what can go wrong, each to its end")
    add = drill.add_argument
    add("names", nargs="*", metavar="NAME", help="a drill of --list, or a .toml file; default: all")
    _add_machine(drill)
    _add_fleet(drill)
    add("--list", action="store_true", help="show the drills and run none")
    add("--out", type=Path, default=Path("out/drill"), help="default: %(default)s")
    add("--json", action="store_true", help="print the table as JSON")
    many = commands.add_parser("many", help="many runs side by side, a third of them interrupted")
    add = many.add_argument
    add("--runs", type=int, default=20, help="stacks, default: %(default)s")
    add("--at-once", type=int, default=os.cpu_count(), help="machines, default: one per core")
    _add_fleet(many, MIXED)
    add("--out", type=Path, default=Path("out/many"), help="default: %(default)s")
    add("--json", action="store_true", help="print the table as JSON")
    many.set_defaults(machine=PROCESS)
    aws = commands.add_parser("aws", help="start the embedded AWS, bootstrapped, until Ctrl-C")
    add = aws.add_argument
    add("--port", type=int, default=5566, help="0 for a free one, default: %(default)s")
    add(
        "--machines",
        action="store_true",
        help="boot the machines that a deployed stack requests, as processes; tick its Guard",
    )
    grants = commands.add_parser(
        "grants", help="print every IAM statement with the rehearsals that used it, in Markdown"
    )
    grants.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="rehearsals' --out")
    alarms = commands.add_parser("alarms", help="try every alarm on its fault and on healthy runs")
    alarms.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser.parse_args(arguments)


def _add_fleet(command: argparse.ArgumentParser, *more: str) -> None:
    command.add_argument(
        "--fleet",
        choices=(*KINDS, *more),
        default=KINDS[0],
        help="a Spot fleet or Auto Scaling groups, default: %(default)s",
    )


def _add_machine(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--machine",
        choices=(PROCESS, NSPAWN),
        default=PROCESS,
        help="machines: processes, or containers with systemd and cloud-init (Linux, root); "
        "default: %(default)s",
    )


def _add_demo(demo: argparse.ArgumentParser) -> None:
    add = demo.add_argument
    add("--out", type=Path, default=Path("out/demo"), help="default: %(default)s")
    _add_machine(demo)
    _add_fleet(demo)
    add(
        "--hosts",
        type=int,
        choices=RANKS,
        default=1,
        help="run one SageMaker training job on this many instances instead of the fleet",
    )
    add("--size", default="g5.xlarge", help="instance type, default: %(default)s")
    add("--program", type=Path, metavar="FOLDER", help="train this program instead of a workload")
    add(
        "--workload",
        default="trajectory",
        help="a known name, or your own as package.module:NAME; default: %(default)s",
    )
    add("--source", type=Path, metavar="FOLDER", help="folder with your own workload's module")
    add("--data", type=Path, metavar="FOLDER", help="data for your own workload")
    add("--recipe", help="default: demo for trajectory, laptop for all others")
    add("--overrides", default="", help='recipe fields, "epochs=2 width=64"')
    add(
        "--count",
        type=argument_type(parse_positive_count),
        help=f"samples to make; {by_workload('count')}",
    )
    add("--checkpoint-interval", help=by_workload("checkpoint_interval"))
    add(
        "--notice-seconds",
        type=argument_type(parse_positive),
        help="from the notice to SIGKILL (EC2: 120); default: 15, and more on a busy machine",
    )
    add(
        "--interrupt",
        type=argument_type(parse_interruption),
        action="append",
        metavar="WHEN",
        help=f"{SYNTAX}; repeat in order; {by_workload('interruptions')}, "
        f"{' '.join(PROGRAM_INTERRUPTIONS)} for a program, in the last stage of your own workload",
    )
    add("--no-interruptions", action="store_true", help="do not interrupt the run")
    add("--json", action="store_true", help="print the receipt as JSON")
