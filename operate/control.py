"""`runs stop`, `resume`, `shell`. A stop is an interruption like any other: the trainer saves."""

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from contract.errors import UserError
from contract.readable import shown
from operate.runs import OperatedRun, committed_step
from operate.status import look
from stacks import StackFleet
from training import main as training
from training.durable import Events

_POLL_SECONDS = 2.0
_RUN_URI = re.compile(r"\0training\0(?:run|sweep)\0.*--runs?-uri[=\0]([^\0]+)")


def say(text: str) -> None:
    """Inform a person on stderr, apart from what the verb prints."""
    print(shown(text), file=sys.stderr, flush=True)


def carry_out(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> None:
    """Run another of our commands, which prints to stderr; exit with its code if it fails."""
    with redirect_stdout(sys.stderr):
        if code := command(arguments):
            raise SystemExit(code)


def stop(run: OperatedRun, reason: str) -> dict[str, Any]:
    """Stop a run and wait until it has saved."""
    if was_ended := (head := run.head) is not None and head.is_ended:
        sight = look(run) if run.stack else None
        if sight is None or not (sight.capacity or sight.live):
            raise UserError(f"{run.id} is {head.state} already")
        say(f"{run.id} is {head.state}; its {'fleet' if sight.capacity else 'machine'} still runs")
    if run.folder is not None:
        stop_process(run.folder)
    elif run.stack:
        _stop_fleet(run, reason)
        _refuse_deploy(run, "the fleet that it had is at zero")
    else:
        raise UserError(f"no stack of this account and region trains {run.id}")
    head = run.head
    committed = committed_step(head)
    step = committed or 0
    saved = "before its first commit" if committed is None else f"saved at step {step}"
    done = f"is stopped, {saved}"
    if head is not None and head.state == "running":
        done = f"is stopped, but ended before it could save: its last commit is of step {step}"
    if head is not None and head.is_ended:  # a machine trains on until its notice ends
        why = "its fleet is at zero now" if was_ended else "it got there while it was stopped"
        done = f"is {head.state}, at step {step}: {why}"
    return {"run": run.id, "done": done, "committed_step": step}


def _stop_fleet(run: OperatedRun, reason: str) -> None:
    sight, fleet = look(run), StackFleet.of(run.outputs["FleetIdOutput"])
    if sight.capacity or fleet.is_new():
        fleet.send_to_zero()
        _record(run, "stopped", reason)
        say("the fleet is at zero: its machine saves and ends")
    # A Spot fleet gives its on-demand machines no notice; they also save at a shutdown.
    for one in sight.live:
        if one.is_on_demand:
            one.terminate()
    # After its notice, a machine may take just as long to shut down.
    until = time.monotonic() + 2 * run.settings.notice_seconds + 180.0
    while (sight := look(run)).is_saving:
        if time.monotonic() > until:
            left = next(one.id for one in sight.machines if not one.is_gone)
            raise UserError(f"the fleet is at zero, but {left} has not ended; try again")
        time.sleep(_POLL_SECONDS)


def _record(run: OperatedRun, what: str, reason: str) -> None:
    host, why = socket.gethostname(), f": {reason}" if reason else ""
    Events(run.store, host).emit(what, source="person", message=f"from {host}{why}")


def _refuse_deploy(run: OperatedRun, done: str) -> None:
    """Refuse a deploy in progress: its outputs may name a fleet that another replaces.

    Once CloudFormation cleans up, they name the one that stays.
    """
    if re.fullmatch("(?!DELETE|.*CLEANUP).*_IN_PROGRESS", run.status):
        raise UserError(
            f"{run.stack} is being deployed ({run.status}), perhaps with another fleet: {done}; "
            "repeat this command once the deploy is over"
        )


def stop_process(folder: Path) -> None:
    """Send SIGTERM to the local process that trains the run or sweep, which makes it save."""
    import psutil

    found = dict[int, psutil.Process]()
    for one in psutil.process_iter(["cmdline", "cwd", "ppid"]):
        given = _RUN_URI.search("\0".join(one.info["cmdline"] or ()))
        if given and Path(one.info["cwd"] or "/", given[1]).resolve() == folder:
            found[one.pid] = one
    # Ranks share the command line of the process that started them, which passes the signal on.
    leaders = [one for one in found.values() if one.info["ppid"] not in found]
    if not leaders:
        raise UserError(f"no process on this machine trains {folder}; was it already interrupted?")
    for one in leaders:
        say(f"process {one.pid} gets SIGTERM, saves and ends")
        one.terminate()
    psutil.wait_procs(leaders)


def resume(run: OperatedRun, reason: str) -> dict[str, Any]:
    """Reopen the run if it has failed, and request its machine again."""
    if run.status.startswith("DELETE_"):
        raise UserError(f"{run.stack} is being deleted; once it is gone, deploy it again")
    head = run.head
    if head is not None and head.state == "finished":
        raise UserError(
            f"{run.id} has finished; to train longer, start another run from it: --init-from "
            f'{run.uri} with other arguments, for a stack "init_from" in program.json and a new '
            "run_id, or, for a workload, with --extend-to"
        )
    if head is not None and head.state == "failed":
        say(f"it had failed: {head.reason}")
        carry_out(training, ["reopen", "--run-uri", run.uri, "--reason", reason])
    if run.folder is not None:
        say("now start its command again")
    elif not run.stack:
        say(f"now deploy it with its options: npx cdk deploy TrainingStack -c run_id={run.id} ...")
    elif not (fleet := StackFleet.of(run.outputs["FleetIdOutput"])).read_capacity()[0]:
        _refuse_deploy(run, "nothing was requested")
        fleet.set_capacity(1, run.settings.on_demand_base)
        _record(run, "requested", reason)
        say("the fleet requests a machine")
    else:
        say(f"its fleet requests one already; `runs status {run.id}` says what it waits for")
    step = committed_step(head) or 0
    when = "" if run.stack else " once started again"
    return {"run": run.id, "done": f"resumes from step {step}{when}", "committed_step": step}


def shell(run: OperatedRun) -> NoReturn:
    """Become a Session Manager session on the run's newest machine."""
    live = look(run).live
    if not live:
        raise UserError(f"{run.id} has no machine now; `runs status` says what it waits for")
    if shutil.which("session-manager-plugin") is None:
        raise UserError("session-manager-plugin is not on PATH; docs/runs.md says where to get it")
    os.environ.pop("PYTHONPATH", None)  # ours, which the AWS CLI must not see
    command = (sys.executable, "-m", "awscli", "ssm", "start-session", "--target", live[-1].id)
    os.execv(sys.executable, command)
