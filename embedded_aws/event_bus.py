"""The rehearsal's EventBridge: it delivers events to the targets of the deployed rules.

moto matches the rules. A Lambda target runs the handler from the function's deployed code (never
from our source tree) in its own process and configured environment, which serves later events too,
like Lambda's; a topic gets a message, a log group a line.
"""

import contextlib
import hashlib
import io
import json
import os
import select
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, cast

from moto.awslambda_simple.models import lambda_simple_backends
from moto.events.models import EventPattern
from moto.sts.models import AssumedRole

from embedded_aws.iam.sessions import FUNCTION_KEY, variables_of
from embedded_aws.server import EmbeddedAws

SERVE = """
import importlib, json, sys, traceback
answers, sys.stdout = sys.stdout, sys.stderr
module, name = sys.argv[1].rsplit(".", 1)
handler = getattr(importlib.import_module(module), name)
for line in sys.stdin:
    try:
        answer = [handler(json.loads(line), None), None]
    except Exception:
        traceback.print_exc()
        answer = [None, traceback.format_exc().strip().rpartition("\\n")[2]]
    print(json.dumps(answer), file=answers, flush=True)
"""
_SCHEDULED = "Scheduled Event"
# EventBridge's action on a target, which the target's own policy must allow.
_TARGET_ACTIONS = {
    "lambda": "lambda:InvokeFunction",
    "sns": "sns:Publish",
    "logs": "logs:PutLogEvents",
}


@dataclass(kw_only=True, slots=True)
class Invocation:
    """One run of a deployed function: its event, its return value or its error's last line."""

    function: str
    answer: dict[str, Any] | None
    error: str | None
    seconds: float
    tries: int = 1


@dataclass(kw_only=True, slots=True)
class EventBus:
    """Delivers events to the targets of the rules that match them, one at a time and in order.

    A background thread delivers, because a function takes a second and the publishing rehearsal
    must not wait for it; `close` waits for pending deliveries.
    """

    # Lambda retries an event twice, after one and two minutes; a rehearsal does not wait.
    TRIES: ClassVar[int] = 3
    aws: EmbeddedAws
    code_folder: Path
    # A rehearsal's changes to the functions: variables that override the deployed ones, and
    # whether events invoke them at all.
    variables: Mapping[str, str] = field(default_factory=dict)
    invokes: bool = True
    invocations: list[Invocation] = field(default_factory=list)
    _warm: dict[str, "FunctionProcess"] = field(default_factory=dict)
    _sessions: dict[str, AssumedRole] = field(default_factory=dict)
    _pending: list[Future[None]] = field(default_factory=list)
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def publish(
        self,
        source: str,
        detail_type: str,
        detail: Mapping[str, Any],
        resources: Sequence[str] = (),
    ) -> None:
        """Deliver one event for every enabled rule whose pattern matches it."""
        event = {
            "version": "0",
            "id": str(uuid.uuid4()),
            "detail-type": detail_type,
            "source": source,
            "account": self.aws.account,
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "region": self.aws.region,
            "resources": list(resources),
            "detail": dict(detail),
        }
        self._pending.append(self._worker.submit(self._deliver, event))

    def tick(self) -> None:
        """Trigger every scheduled rule once, as their schedules would."""
        self.publish("aws.events", _SCHEDULED, {})

    @property
    def is_idle(self) -> bool:
        """Whether every published event has been delivered."""
        return all(delivery.done() for delivery in self._pending)

    def close(self) -> None:
        """Wait until every published event is delivered; raise what a delivery raised."""
        self._worker.shutdown(wait=True)
        for process in self._warm.values():
            process.end()
        for delivery in self._pending:
            delivery.result()

    def _deliver(self, event: dict[str, Any]) -> None:
        is_tick = event["detail-type"] == _SCHEDULED
        events = self.aws.client("events")
        pages = events.get_paginator("list_rules").paginate()
        for rule in (rule for page in pages for rule in page["Rules"]):
            if rule.get("State") != "ENABLED" or is_tick != ("ScheduleExpression" in rule):
                continue
            pattern = rule.get("EventPattern")
            if pattern and not EventPattern.load(pattern).matches_event(cast(Any, event)):
                continue
            for target in events.list_targets_by_rule(Rule=rule["Name"])["Targets"]:
                # As on AWS, a denial by a policy is silent; the evidence records it.
                with contextlib.suppress(PermissionError):
                    self._send(target, event, rule["Arn"])

    def _send(self, target: Mapping[str, Any], event: dict[str, Any], rule: str) -> None:
        arn, stream = target["Arn"], event["id"]
        event = json.loads(target["Input"]) if "Input" in target else event
        service = arn.split(":")[2]
        if service == "lambda" and not self.invokes:
            return
        if service in _TARGET_ACTIONS:
            resource = f"{arn}:log-stream:{stream}" if service == "logs" else arn
            self.aws.access.expect("events", rule, _TARGET_ACTIONS[service], resource)
        if service == "lambda":
            self._invoke(arn.split(":")[6], event)
        elif service == "sns":
            self.aws.client("sns").publish(TopicArn=arn, Message=json.dumps(event))
        elif service == "logs":
            self._log(arn.split(":")[6], stream, event)
        else:
            raise ValueError(f"the rehearsal does not support {service} as an event target: {arn}")

    def _log(self, group: str, stream: str, event: dict[str, Any]) -> None:
        logs = self.aws.client("logs")
        logs.create_log_stream(logGroupName=group, logStreamName=stream)
        line = {"timestamp": int(time.time() * 1000), "message": json.dumps(event)}
        logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=[line])

    def _credentials(self, function: Mapping[str, Any]) -> dict[str, str]:
        """Return credentials of the function's role, from one session per role."""
        role, arn = function["Role"], function["FunctionArn"]
        if role not in self._sessions:
            self._sessions[role] = self.aws.access.assume(
                role,
                service="lambda",
                source_arn=arn,
                name=function["FunctionName"],
                keys={FUNCTION_KEY: arn},
            )
        return variables_of(self._sessions[role])

    def _invoke(self, name: str, event: dict[str, Any]) -> None:
        function = lambda_simple_backends[self.aws.account][self.aws.region].get_function(name)
        configured = self.aws.client("lambda").get_function_configuration(FunctionName=name)
        # A deploy may have replaced the code.
        folder = self.code_folder / f"{name}-{hashlib.sha256(function.code_bytes).hexdigest()[:8]}"
        if not folder.exists():
            zipfile.ZipFile(io.BytesIO(function.code_bytes)).extractall(folder)
        deployed = configured.get("Environment", {}).get("Variables", {})
        variables = {"PATH": os.environ["PATH"], **self.aws.environment(), **deployed}
        variables |= {**self._credentials(configured), **self.variables}
        started, handler = time.monotonic(), configured["Handler"]
        tries, error = 0, None
        while tries == 0 or (error is not None and tries < self.TRIES):
            tries += 1
            process = self._warm.get(name)
            if process is None or not process.serves(handler, variables, folder):
                if process is not None:
                    process.end()
                process = FunctionProcess(handler=handler, variables=variables, folder=folder)
                self._warm[name] = process
            answer, error = process.invoke(event, configured.get("Timeout", 3))
        seconds = time.monotonic() - started
        self.invocations.append(
            Invocation(function=name, answer=answer, error=error, seconds=seconds, tries=tries)
        )


class FunctionProcess:
    """A process that runs one deployed function's handler, event after event."""

    def __init__(self, *, handler: str, variables: Mapping[str, str], folder: Path) -> None:
        """Start it in the folder of the function's code; what it prints goes to FOLDER.log."""
        self._started_with = (handler, dict(variables), folder)
        self._log = folder.with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, handler],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env=dict(variables),
            )

    def serves(self, handler: str, variables: Mapping[str, str], folder: Path) -> bool:
        """Whether it runs and was started with this handler, these variables and this code."""
        started_with = (handler, dict(variables), folder)
        return self._process.poll() is None and self._started_with == started_with

    def invoke(
        self, event: Mapping[str, Any], timeout_seconds: float
    ) -> tuple[dict[str, Any] | None, str | None]:
        """Return the handler's answer to an event, or its error; a timeout ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(event).encode() + b"\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout_seconds)[0]:
            self.end()
            return None, f"Task timed out after {timeout_seconds:g} seconds"
        line = self._process.stdout.readline()
        if not line:
            self.end()
            return None, self._log.read_text().strip().rpartition("\n")[2]
        answer, error = json.loads(line)
        return answer, error

    def end(self) -> None:
        """Kill the process, as AWS does with one that it no longer needs."""
        self._process.kill()
        self._process.communicate()
