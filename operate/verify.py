"""`runs verify`: a run's record against the rules of docs/how-it-works.md; it changes nothing."""

import json
from dataclasses import replace

from contract.verify import Verdict, verify
from operate.runs import OperatedRun
from operate.status import look
from stacks import quick_client
from training.durable import History


def verify_run(run: OperatedRun) -> list[Verdict]:
    """Judge a run by every rule: what breaks it, and what there is too little of to judge."""
    run.opened()  # refuses what is no run
    trace = History.trace(run.store)
    if run.folder is None:
        bucket, _, prefix = run.uri.removeprefix("s3://").partition("/")
        trace = trace.with_past(quick_client("s3"), bucket, prefix)
    if run.stack:  # up to date: the Guard's last look is minutes old
        trace = replace(trace, ledger=json.loads(look(run).ledger.to_json()))
    return verify(trace)
