"""`python -m training reopen`: let a failed run continue, or resume one from a chosen checkpoint.

Refuses a finished run, and one whose writer shows a heartbeat. Imports no torch, unless the config
changes.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from contract.errors import Exit, UserError
from contract.keys import ADAPTATION, CONFIG, RECEIPT
from training.cli.run import RUN_URI, add_override, add_writer, count, positive
from training.durable import Events, Head, Reopened, RunConfig, Store, open_store, reopen_run


def add_reopen(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reopen`."""
    parser.description = (
        "Let a failed run continue: the next `run` with the same options resumes it. With "
        "--from-checkpoint it resumes from that checkpoint; later ones leave the head at once, and "
        "the next attempt deletes their files. With --from-scratch it begins at step 0, and the "
        "old checkpoints stay until it has more new ones than are kept. This choice is not an "
        "option of `run`, because a replacement machine repeats the same `run` and would go back "
        "again. A finished run, and one whose writer is alive, are refused. A failed run that has "
        "no checkpoint may change its config by --override instead of starting over."
    )
    add = parser.add_argument
    add("--run-uri", required=True, help=RUN_URI)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--from-checkpoint", type=count, metavar="STEP", help="resume from this step's checkpoint"
    )
    start.add_argument("--from-scratch", action="store_true", help="resume from no checkpoint")
    add_override(parser, "what to change; pass it to the next `run`, too, or to the stack")
    add("--reason", default="", metavar="TEXT", help="why, for the run's events")
    add_writer(parser, "who says so, for the run's events")
    add(
        "--lease-ttl-seconds",
        type=positive,
        default=30.0,
        help="a writer that shows no heartbeat for this long is gone (default: %(default)s)",
    )
    add("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(act=_reopen)


def _reopen(options: argparse.Namespace) -> int:
    store = open_store(options.run_uri)

    def waiting(writer: str) -> None:
        if not options.json:
            seconds = options.lease_ttl_seconds
            print(f"[lease] held by {writer}; watching its heartbeat for {seconds:g} s", flush=True)

    overrides = _change_config(store, options.override) if options.override else None
    done = reopen_run(
        store,
        options.from_checkpoint,
        options.lease_ttl_seconds,
        waiting,
        from_scratch=options.from_scratch,
    )
    about = {
        "was": done.before.state,
        "checkpoint": done.newest.name if done.newest else None,
        "step": done.newest.step if done.newest else 0,
        "dropped": done.dropped,
        **({"overrides": overrides} if overrides else {}),
    }
    Events(store, options.writer).emit(
        "reopened", "ok", reason=options.reason, failed_because=done.before.reason, **about
    )
    store.delete([RECEIPT])  # it is for the failure, and the run goes on
    if options.json:
        print(json.dumps({"run": store.uri, "state": done.after.state, **about}, indent=1))
    else:
        print(_sentence(store.uri, done))
        if overrides:
            print(f"its overrides are now: {overrides}")
    return Exit.FINISHED


def _change_config(store: Store, pairs: Sequence[str]) -> str:
    """Change the overrides of a failed run without a checkpoint; return all of them.

    Nobody can train it at this time: it stays failed until it is reopened.
    """
    from training.engine.job import ResolvedWorkload
    from training.registry import load_workload, parse_overrides, resolve_config
    from training.settings import recorded

    head, record = Head.read(store), RunConfig.read(store)
    if head is None or record is None or head.state != "failed" or head.checkpoints:
        what = "has no config yet" if head is None or record is None else f"is {head.state}"
        if head is not None and head.checkpoints:
            what = f"has {len(head.checkpoints)} checkpoints with its config"
        raise UserError(
            f"{store.uri} {what}; only a failed run without a checkpoint can change its config: "
            "leave --override out, or start a new run"
        )
    workload, given = load_workload(record.workload), parse_overrides(pairs)
    overrides = {**record.overrides, **given}
    fitted = {name: text for name, text in record.fitted.items() if name not in given}
    resolved = ResolvedWorkload.of(workload, record.recipe, {**fitted, **overrides})
    # The run's own code, if it is older, lacks some fields, and its recipe may say something else.
    before = recorded(resolve_config(workload, record.recipe, record.all_overrides))
    now = recorded(resolved.config)
    changed = {n: value for n, value in now.items() if n in given or before[n] != value}
    key = {"threads": now["num_threads"], "deterministic": now["deterministic"]}
    new = replace(
        record,
        overrides=overrides,
        fitted=fitted,
        config={**record.config, **changed},
        numerics_key={**record.numerics_key, **key, "stages": resolved.numerics},
    )
    store.delete([ADAPTATION])  # it is for another config
    store.put(CONFIG, new.to_bytes())
    return " ".join(f"{name}={text}" for name, text in sorted(overrides.items()))


def _sentence(uri: str, done: Reopened) -> str:
    left = len(done.after.checkpoints) if done.newest is None else 0
    why = f"{left} checkpoints are left behind" if left else "it has no checkpoint"
    newest = f"step {done.newest.step}" if done.newest else f"its beginning: {why}"
    text = f"[ok] {uri} was {done.before.state}; its next attempt resumes from {newest}"
    return text + (f", without {', '.join(done.dropped)}" if done.dropped else "")
