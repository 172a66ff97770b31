"""The demo, end to end: deploy, train, interrupt, resume, finish, prove (`make demo`).

All lines of its programs and machines go to demo.log; the news among them are printed.
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from contract.keys import FINAL, HEAD
from embedded_aws import EventBus
from rehearsal.demo.actions import Action, RehearsedRun
from rehearsal.demo.children import Child
from rehearsal.demo.deployment import NOTICE_SECONDS, DeployedStacks
from rehearsal.demo.fleet import POLL_SECONDS, BootableMachine, Fleet, RehearsalFailed
from rehearsal.demo.grants import keep
from rehearsal.demo.receipt import Curves, Rehearsed, loss_curves, make_receipt
from rehearsal.demo.run_files import Files, FolderFiles, read_json
from rehearsal.demo.trained import RehearsedProgram, RehearsedWorkload, stack_context
from rehearsal.machines.metadata import RehearsedInstance
from rehearsal.machines.quirks import Quirks

COLUMNS = 120 - len("[9999.9 s] ")
# The most lines of news; phases and interruptions do not count, and the receipt adds about 25.
NEWS = 70
_PROGRESS_SECONDS = 12.0
_NOISE = re.compile(
    r": {2,}|: \[(checkpoint|bottleneck|\w+\] (after epoch|artifact))"
    r"|^(cdk|upload|uninterrupted:|\d+ resources)"
)
# Steps of a boot, which are news only for the first machine.
_BOOT = re.compile(r"^i-\w+: \[ok\] (?!training:|dataset:|fleet )[\w-]+: ")
_PROGRESS = re.compile(r": +\d+/\d+ |^waiting for ")


class DemoLog:
    """Prints and keeps lines; `usual` are the seconds of the demo's phases on two idle cores."""

    def __init__(self, say: Callable[[str], None], path: Path, usual: Sequence[float]) -> None:
        self._say, self._path, self._usual = say, path, usual
        self._began, self._phase, self._elapsed = time.monotonic(), -1, 0.0
        self._num_news, self._progress_at, self._first = 0, 0.0, ""

    def __call__(self, text: str, *, shows: bool = True) -> None:
        """Keep a line, and print it if it `shows`."""
        with self._path.open("a", encoding="utf-8") as log:
            print(text, file=log)
        if shows:
            is_whole = len(text) <= COLUMNS or "[program] no snapshot" in text  # what to do is last
            self._say(text if is_whole else f"{text[: COLUMNS - 1]}…")

    def hear(self, text: str) -> None:
        """Keep a line from a program or machine; print it if it is news."""
        is_news = "[failed]" in text or self._is_news(text)
        self._num_news += is_news
        self(text, shows=is_news)

    def begin(self, what: str, *, is_last: bool = False) -> None:
        """Print which phase begins, and how long it and all remaining phases will take."""
        last = len(self._usual) - 1
        self._phase = last if is_last else min(self._phase + 1, last - 1)
        self._elapsed = time.monotonic() - self._began
        here, left = self._usual[self._phase], sum(self._usual[self._phase :])
        times = f"about {here * self.pace:.0f} s, {left * self.pace:.0f} s to the end"
        self(f"{self._phase + 1}/{len(self._usual)} {what}: {times}")

    @property
    def pace(self) -> float:
        """How many times longer than usual the phases before took; 1 if this machine is idle."""
        usual = sum(self._usual[: max(self._phase, 0)])
        slowed = self._elapsed / usual if usual else os.getloadavg()[0] / (os.cpu_count() or 1)
        return max(1.0, slowed)

    def _is_news(self, text: str) -> bool:
        if self._num_news >= NEWS or _NOISE.search(text):
            return False
        if _BOOT.search(text):
            self._first = self._first or text.partition(":")[0]
            return text.startswith(self._first)
        if _PROGRESS.search(text):
            if time.monotonic() - self._progress_at < _PROGRESS_SECONDS * self.pace:
                return False
            self._progress_at = time.monotonic()
        return True


# The Guard runs every ten minutes, too rarely for a rehearsal of a few minutes.
GUARD_TICK_SECONDS = 30.0
_NOTICE_SECONDS = 15.0
# On an idle machine, and at most: after each kill, the run waits that long.
_LEASE_TTL_SECONDS, _MAX_LEASE_TTL_SECONDS = 3.0, 6.0
# On an idle machine, for the fleet and then for each wait.
_PATIENCE_SECONDS = 1500.0
# After a trainer's end, the time for its machine to send the rest.
_QUIET_SECONDS = 2.0


def usual_seconds(num_interruptions: int) -> list[float]:
    """Return each phase's seconds: three to deploy, one for each machine, one to compare."""
    return [4.0, 5.0, 8.0, *[25.0] * (num_interruptions + 1), 3.0]


@dataclass(kw_only=True, slots=True)
class Demo:
    """One rehearsal from deploy to receipt, phase by phase; its times follow the log's pace."""

    trained: RehearsedWorkload | RehearsedProgram
    plan: Sequence[Action]
    options: argparse.Namespace  # of the command `demo`
    stacks: DeployedStacks
    log: DemoLog
    started: float = field(default_factory=time.monotonic)
    notice_seconds: float = 0.0
    context: dict[str, str] = field(default_factory=dict)  # the stack's parameters
    _ends: dict[str, float] = field(default_factory=dict)  # when trainers ended, by instance

    @property
    def _machines(self) -> Path:
        return self.stacks.folder / "machines"

    def rehearse(self) -> tuple[dict[str, Any], Curves]:
        """Run all phases; return receipt and losses, or raise RehearsalFailed or ChildFailed."""
        rehearsed = self._run()
        receipt = make_receipt(rehearsed)
        return receipt, loss_curves(rehearsed.run.files, rehearsed.reference, receipt)

    def _run(self) -> Rehearsed:
        stacks, folder = self.stacks, self.stacks.folder / "uninterrupted"
        reference = self._deploy(folder)
        resources = stacks.check_resources()
        bus = EventBus(aws=stacks.aws, code_folder=stacks.folder / "functions")
        fleet = stacks.fleet(bus, self._machine, self.log)

        def has_machine() -> bool:
            fleet.step()
            return bool(fleet.running())

        # The Guard requests a group's first machine, when it hears of the group.
        self._wait(lambda: f"the first instance of fleet {fleet.id}", has_machine)
        run = RehearsedRun(fleet=fleet, files=stacks.run_files(), plan=self.plan)

        def is_over() -> bool:
            run.step()
            self._skip_idle_notices(fleet)
            if reference.process.poll() not in (None, 0):
                reference.expect()
            return self._is_over(fleet, run.files)

        try:
            fleet.follow(
                is_over,
                relay=self.log.hear,
                tick_seconds=GUARD_TICK_SECONDS,
                timeout_seconds=_PATIENCE_SECONDS * self.log.pace,
                logs=self._machines,
            )
        finally:
            fleet.close()
        for life in fleet.lives.values():
            life.read_metrics()
        self._finish(reference)
        self._wait(lambda: "the Guard, which still has events to handle", lambda: bus.is_idle)
        bus.close()
        # The run's bucket goes with the embedded AWS; anybody can compare these weights again.
        if (weights := run.files.read(FINAL)) is not None:
            (stacks.folder / "interrupted.safetensors").write_bytes(weights)
        return Rehearsed(
            permissions=keep(stacks.aws.access.evidence.report(), stacks.folder),
            run=run,
            reference=FolderFiles(folder=folder),
            resources=resources,
            processes_left=stacks.processes_left(stacks.folder),
            notice_seconds=self.notice_seconds,
            seconds=time.monotonic() - self.started,
        )

    def _finish(self, reference: Child) -> None:
        """Wait for the uninterrupted run."""
        self.log.begin("the comparison with the uninterrupted run", is_last=True)
        self._wait(
            lambda: "the uninterrupted run, " + " ".join(list(reference.tail)[-1:]),
            lambda: reference.process.poll() is not None,
        )
        reference.expect()

    def _wait(self, what: Callable[[], str], is_done: Callable[[], bool]) -> None:
        seconds = _PATIENCE_SECONDS * self.log.pace
        end = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > end:
                raise RehearsalFailed(f"gave up after waiting {seconds:.0f} s for {what()}")
            self.log.hear(f"waiting for {what()}")
            time.sleep(POLL_SECONDS)

    def _deploy(self, uninterrupted: Path) -> Child:
        """Deploy; as soon as the data exist, start the uninterrupted run in this folder."""
        stacks, options, log = self.stacks, self.options, self.log
        log.begin("the account and, at the same time, the data")
        making = self.trained.make_data(stacks)
        stacks.bootstrap()
        log.begin("the stacks' templates")
        usual = min(NOTICE_SECONDS, round(_NOTICE_SECONDS * log.pace))
        self.notice_seconds = options.notice_seconds or usual
        assembly = stacks.folder / "cdk.out"
        self.context = stack_context(
            self.trained.context(),
            size=options.size,
            notice_seconds=self.notice_seconds,
            lease_ttl_seconds=min(_MAX_LEASE_TTL_SECONDS, _LEASE_TTL_SECONDS * log.pace),
        )
        more = {"sweep.instances": str(options.hosts)} if options.hosts > 1 else {}
        stacks.synthesize(assembly, {**self.context, **more, "fleet": options.fleet}).expect()
        if making is not None:
            making.expect()
        reference = self.trained.start_reference(stacks, uninterrupted)
        log.begin(f"DatasetStack, the upload and {stacks.training}")
        stacks.aws.capacity.notice_seconds = self.notice_seconds
        uploads: list[Child] = []

        def upload() -> None:
            if not uploads:
                with suppress(ClientError, KeyError):  # before the bucket exists
                    uploads.append(stacks.upload(self.trained.dataset))

        stacks.deploy(assembly, stacks.training, meanwhile=upload)
        upload()
        uploads[0].expect()
        return reference

    def _is_over(self, fleet: Fleet, run: Files) -> bool:
        if not fleet.is_over():
            return False
        head = read_json(run, HEAD)
        if head is None or head["state"] != "finished":
            state = "no head" if head is None else f"{head['state']}: {head['reason']}"
            raise RehearsalFailed(
                f"the fleet went to zero but the run did not finish ({state}); "
                f"the machines' logs are in {self._machines}"
            )
        return True

    def _skip_idle_notices(self, fleet: Fleet) -> None:
        """End each notice in which the trainer has ended; EC2 would wait for the notice's end."""
        for life in fleet.running():
            lines = life.machine.log_lines() if life.ends_at else ()
            if any(line.startswith("after training: ") for line in lines):
                since = self._ends.setdefault(life.instance.id, time.monotonic())
                if time.monotonic() - since > _QUIET_SECONDS * self.log.pace:
                    fleet.skip_notice(life)

    def _machine(self, instance: RehearsedInstance) -> BootableMachine:
        number = len(list(self._machines.glob("*")))
        until = f"until {self.plan[number]}" if number < len(self.plan) else "to the end"
        self.log.begin(f"machine {number + 1} of {max(number, len(self.plan)) + 1}, {until}")
        return self.stacks.machine(instance, self._machines, self.notice_seconds, Quirks())
