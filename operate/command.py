"""The command line `runs VERB [RUN]`: parses, calls, prints, and explains AWS's refusals."""

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from botocore.exceptions import BotoCoreError, ClientError

from contract.aws_errors import DENIED, explain
from contract.errors import Exit, UserError
from contract.grammar import argument_type, parse_count
from contract.readable import shown
from operate import control
from operate.download import download, open_report
from operate.logs import RunLog, as_line
from operate.runs import find_run
from operate.status import as_text, cost_of, list_runs, read_status
from operate.sweeps import find_operated_sweep, open_sweep, resume_sweep, stop_sweep
from operate.verify import verify_run
from sizing import show_table
from training.durable import StoreError, attended, exit_code_of

_RUN = (
    "an id, s3://bucket/runs/ID, or a folder, of a run or a sweep; default: the run of the "
    "account's only stack"
)
_PLACE = "s3://bucket/runs, or a folder with runs; default: the account"
_REFRESH_SECONDS = 5.0
_OVER = ("finished", "failed", "stopped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute one verb; return the exit code."""
    options = _parser().parse_args(arguments)
    # boto3 reads only AWS_DEFAULT_REGION; the CDK CLI prefers AWS_REGION.
    if region := os.environ.get("AWS_REGION"):
        os.environ["AWS_DEFAULT_REGION"] = region
    with attended():
        return exit_code_of(lambda: _act(options))


def _act(options: argparse.Namespace) -> int:
    try:
        if (found := options.act(options)) is not None:
            _print(found, as_json=options.json)
    except (ClientError, BotoCoreError, StoreError) as error:
        _explain(error)
    except BrokenPipeError:  # as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print(found: Any, *, as_json: bool) -> None:
    """Print rows as a table, an action as a sentence and a status as lines, or all as JSON."""
    if as_json:
        print(json.dumps(found, indent=1))
    elif isinstance(found, dict):
        print(f"[ok] {found['run']} {found['done']}" if "done" in found else as_text(found))
    else:
        usd = [row["usd"] for row in found]
        total = "at least " * (None in usd) + f"${sum(filter(None, usd)):.2f} in total"
        show_table(
            found,
            notes=[total] if found else ["none here; in a bucket, runs lie below s3://BUCKET/runs"],
        )


def _cost(options: argparse.Namespace) -> list[dict[str, Any]] | dict[str, Any] | None:
    """Return each machine's cost and what the money bought as JSON, or print them as tables."""
    if (sweep := find_operated_sweep(options.run)) is not None:
        return [{"run": row["run"], "usd": row["usd"]} for row in sweep.rows()]
    rows, bought = cost_of(find_run(options.run))
    if options.json:
        return {"machines": rows, "goodput": bought.to_json()}
    _print(rows, as_json=False)
    causes = [{"what the money bought": name, "": text} for _, name, text, *_ in bought.rows()]
    ends = [f"{one.machine}: {shown(str(one))}" for one in bought.ends]
    show_table(causes, notes=[bought.sentence(), *ends])
    return None


def _explain(error: Exception) -> NoReturn:
    """Raise a UserError for what the caller can change, otherwise the error itself."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    if cause is not None and (why := explain(cause)):
        is_denied = isinstance(cause, ClientError) and cause.response["Error"]["Code"] in DENIED
        policy = "; docs/runs.md has the policy to attach to them" * is_denied
        raise UserError(why + policy) from error
    raise error if isinstance(error, StoreError) else StoreError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="runs", description="Runs on AWS or in a folder.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, text: str, act: Any, about: str = _RUN) -> Any:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(act=act)
        add = added.add_argument
        add("run", nargs="?", metavar="RUN" if about is _RUN else "PLACE", help=about)
        add("--json", action="store_true", help="print JSON")
        return add

    verb("list", "every run", lambda o: list_runs(o.run), _PLACE)
    verb("status", "state, machine, step, time left, dollars; refreshes in a terminal", _status)
    add = verb("logs", "boot, trainer and script of all machines in one stream", _logs)
    add("-f", "--follow", action="store_true", help="keep printing until the run is over")
    add("--tail", type=argument_type(parse_count), metavar="N", help="begin with the last N lines")
    for name, text in (("stop", "save, then end its machine"), ("resume", "train on")):
        add = verb(name, text, partial(_controlled, name))
        add("--reason", default="", metavar="TEXT", help="why, for the run's events")
    verb("cost", "hours and dollars of each machine, and what they bought", _cost)
    verb("verify", "its record against the rules that every run keeps", _verify)
    text = "weights, report and receipt, or a checkpoint"
    add = verb("download", text, lambda o: download(find_run(o.run), o.out, o.checkpoint))
    add("--checkpoint", help="newest, best, a step, or the start of a name")
    add("--out", type=Path, help="default: a folder with the run's name")
    verb("shell", "a session on its machine", lambda o: control.shell(find_run(o.run)))
    text = "its report and its dashboard"
    verb("open", text, _open)
    return parser


def _controlled(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Stop or resume a sweep or a run."""
    if (sweep := find_operated_sweep(options.run)) is not None:
        act = stop_sweep if name == "stop" else resume_sweep
        return act(sweep, options.reason)
    found: dict[str, Any] = getattr(control, name)(find_run(options.run), options.reason)
    return found


def _verify(options: argparse.Namespace) -> None:
    found = verify_run(find_run(options.run))
    if options.json:
        print(json.dumps([{**asdict(each), "verdict": each.word} for each in found], indent=1))
    else:
        for each in found:
            print(f"{each.word:<8} {each.rule}: {each.promise}")
            for why in (*each.broken, *(f"not judged: {what}" for what in each.lacks)):
                print(shown(f"         - {why}"))
    if any(each.broken for each in found):
        raise SystemExit(int(Exit.FAILED))


def _open(options: argparse.Namespace) -> dict[str, Any]:
    if (sweep := find_operated_sweep(options.run)) is not None:
        return open_sweep(sweep)
    return open_report(find_run(options.run), in_browser=not options.json)


def _status(options: argparse.Namespace) -> dict[str, Any] | list[dict[str, Any]] | None:
    if (sweep := find_operated_sweep(options.run)) is not None:
        return sweep.rows()
    run = find_run(options.run)
    found = read_status(run)
    if options.json or not sys.stdout.isatty():
        return found
    from rich.live import Live
    from rich.text import Text

    first = Text.from_ansi(as_text(found))
    with suppress(KeyboardInterrupt), Live(first, auto_refresh=False) as live:
        while found["state"] not in _OVER:
            time.sleep(_REFRESH_SECONDS)
            found = read_status(run, found["goodput"])
            live.update(Text.from_ansi(as_text(found)), refresh=True)
    return None


def _logs(options: argparse.Namespace) -> None:
    run = find_run(options.run)
    log, is_over = RunLog(run.store), not options.follow
    entries = deque(log.new(is_last=is_over), maxlen=options.tail)
    with suppress(KeyboardInterrupt):
        while True:
            for entry in entries:
                print(json.dumps(entry) if options.json else as_line(entry), flush=True)
            if is_over:
                return
            time.sleep(_REFRESH_SECONDS)
            is_over = (head := run.head) is not None and head.is_ended
            entries = deque(log.new(is_last=is_over))
