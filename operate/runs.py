"""Finds one run, by its ID in the account, its URI or its folder, or all runs of a place."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import boto3

from contract.aws_errors import checked, settings_checked
from contract.errors import UserError
from contract.keys import HEAD, RUNS
from contract.stack_names import DESCRIPTIONS, training_id
from stacks import GuardSettings, quick_client
from training.durable import Head, OpenRun, Store, open_store


@dataclass(frozen=True, kw_only=True)
class OperatedRun:
    """One run and, while a stack trains it, that stack with its outputs."""

    uri: str
    stack: str = ""
    status: str = ""  # of the stack, as UPDATE_IN_PROGRESS
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The last part of its URI."""
        return self.uri.rpartition("/")[2]

    @property
    def names(self) -> tuple[str, ...]:
        """What a person may call it: its stack also as the CDK CLI does."""
        return self.id, self.uri, self.stack, training_id(self.stack).partition(" ")[0]

    @property
    def place(self) -> str:
        """Its URI, with the stack that trains it."""
        return f"{self.uri} of {self.stack}" if self.stack else self.uri

    @property
    def folder(self) -> Path | None:
        """Its folder, if it is on this machine."""
        return None if "://" in self.uri else Path(self.uri)

    @cached_property
    def store(self) -> Store:
        """The store of its objects."""
        return open_store(self.uri)

    @property
    def head(self) -> Head | None:
        """Its current head."""
        return Head.read(self.store)

    def opened(self) -> OpenRun:
        """Open it; UserError if it has not begun."""
        if self.stack and self.head is None:
            raise UserError(f"{self.id} has no {HEAD}; what it waits for: runs status {self.id}")
        return OpenRun.at(self.uri)

    @cached_property
    def settings(self) -> GuardSettings:
        """The settings of the stack's Guard: limits, prices, the plan's forecast."""
        if (name := self.outputs.get("GuardFunction")) is None:
            raise UserError(
                f"{self.stack} of {self.id} is older than `runs`; deploy it again, with the same "
                "options (docs/deploy.md, Upgrade)"
            )
        found = quick_client("lambda").get_function_configuration(FunctionName=name)
        return GuardSettings.from_environment(found["Environment"]["Variables"])


def find_run(name: str | None) -> OperatedRun:
    """Return the run of this name; without a name, that of the account's only stack."""
    # An ID has no slash, but a folder may have the same name as one.
    if name and "://" not in name and (re.search("^[.~]|/", name) or (Path(name) / HEAD).is_file()):
        folder = Path(name).expanduser().resolve()
        return OperatedRun(uri=OpenRun.at(str(folder)).store.uri)
    known = account_runs()
    asked = name.rstrip("/") if name else None
    found = [run for run in known if (asked in run.names if asked else run.stack)]
    if len(found) != 1:
        # Teams with prefixes of their own may each have a run of this id, and two stacks one run.
        ids = ", ".join(run.place if found else run.id for run in found or known) or "none"
        region = boto3.Session().region_name
        raise UserError(f"which run is {name or 'meant'}? In this account and {region}: {ids}")
    return found[0]


def account_runs() -> list[OperatedRun]:
    """Return the account's runs, in the buckets and fleets that its stacks' outputs name."""
    deployed, buckets = _deployed()
    kept = [run for each in buckets for run in runs_at(f"s3://{each}/{RUNS}".rstrip("/"))]
    uris = {run.uri for run in deployed}
    return [*deployed, *(run for run in kept if run.uri not in uris)]


def run_buckets() -> list[str]:
    """Return the buckets of runs that the account's stacks name."""
    return list(_deployed()[1])


def _deployed() -> tuple[list[OperatedRun], dict[str, None]]:
    deployed, buckets = list[OperatedRun](), dict[str, None]()
    with settings_checked():
        stacks = quick_client("cloudformation").get_paginator("describe_stacks")
        checked(boto3.DEFAULT_SESSION)
    for page in stacks.paginate():
        for stack in page["Stacks"]:
            if stack.get("Description") not in DESCRIPTIONS.values():
                continue  # another project's outputs may have the same names
            outputs = {each["OutputKey"]: each["OutputValue"] for each in stack.get("Outputs", [])}
            if uri := outputs.get("RunUri"):
                about = {"stack": stack["StackName"], "status": stack["StackStatus"]}
                deployed.append(OperatedRun(uri=uri, **about, outputs=outputs))
            named = uri or outputs.get("SweepsUri") or "//"
            if bucket := outputs.get("RunBucketName") or named.split("/")[2]:
                buckets[bucket] = None
    return deployed, buckets


def runs_at(place: str) -> Iterator[OperatedRun]:
    """Yield the runs of s3://bucket/runs, or of a folder down to two levels below it."""
    if "://" in place:
        for name in sorted(open_store(place).folders("")):
            yield OperatedRun(uri=f"{place}/{name}")
        return
    if not Path(place).is_dir():
        raise UserError(f"{place} is not a folder; name one with runs, or s3://bucket/runs")
    for pattern in ("", "*/", "*/*/"):
        for path in sorted(Path(place).resolve().glob(f"{pattern}{HEAD}")):
            yield OperatedRun(uri=str(path.parent))


def committed_step(head: Head | None) -> int | None:
    """Return the step of the newest commit: a script's own, if it names steps, else its number."""
    newest = head.checkpoints[-1] if head and head.checkpoints else None
    if newest is None:
        return None
    return newest.step if newest.program_step is None else newest.program_step
