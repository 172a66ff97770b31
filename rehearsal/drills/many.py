"""Many runs side by side: a stack each in one account, of which a third lose a machine in mid-run.

EC2 has machines for `at_once` of them, so the others wait, as they would for Spot capacity.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from contract.keys import GUARD
from contract.readable import shown
from contract.stack_names import stack_name, training_stack
from embedded_aws import Course, EventBus
from rehearsal.demo.actions import RehearsedRun, parse_interruption
from rehearsal.demo.children import Child
from rehearsal.demo.deployment import PREFIX, DeployedStacks, handler_poll
from rehearsal.demo.fleet import BootableMachine, RehearsalFailed, instances_of
from rehearsal.demo.run_files import Files, FolderFiles, read_json
from rehearsal.demo.trained import RehearsedWorkload, prepare, stack_context
from rehearsal.drills.drill import EQUAL, Expectation
from rehearsal.drills.drill_run import WAITS, judge, seconds_taken
from rehearsal.machines.metadata import RehearsedInstance
from rehearsal.machines.quirks import Quirks

NOTICE_SECONDS = 5.0
# The workload that starts fastest, for a run of a few seconds.
TRAINED = RehearsedWorkload(
    name="growth",
    recipe="laptop",
    overrides="dense_steps=60 experts_steps=10 grown_steps=10",
    count=300,
    checkpoint_interval="10steps",
)
CONTEXT: Mapping[str, str] = {
    **stack_context(
        TRAINED.context(), size="g5.xlarge", notice_seconds=NOTICE_SECONDS, lease_ttl_seconds=3
    ),
    # Otherwise a run of seconds would end within its notice.
    "train.notice_policy": "stop",
}
# Both kinds of fleet in one account.
MIXED = "mixed"
# Every third run loses its first machine, alternately without a notice and with one.
EVERY, LOSSES = 3, ("kill:dense:20", "notice:dense:20")
POOL = ("g5.xlarge", "us-east-1a")
_TICK_SECONDS, _POLL_SECONDS, _TIMEOUT_SECONDS = 30.0, 0.5, 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SideOutcome:
    """The outcome of one run; without faults, it equals the uninterrupted run bit for bit."""

    stack: str
    machines: int
    taken: str
    seconds: float
    usd: float
    faults: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class SideRun(RehearsedRun):
    """One of the runs, from its deploy on."""

    stack: str
    is_over: bool = False

    def follow(self) -> None:
        """Do what is due; it is over once no machine runs and none will start."""
        self.fleet.step()
        self.step()
        self.is_over = self.fleet.is_over()

    def outcome(self, reference: Files, guard_errors: list[str]) -> SideOutcome:
        """Compare its end with what was promised."""
        expect = Expectation(ends=EQUAL, machines=1 + len(self.plan))
        # ManyRuns checks what all runs together leave behind.
        faults = judge(self, expect, reference, guard_errors)
        billed = (read_json(self.files, GUARD) or {}).get("billed", {})
        usd = sum(each["usd"] for each in billed.values())
        lives = self.fleet.lives.values()
        return SideOutcome(
            stack=self.stack,
            machines=len(lives),
            taken=", ".join(str(each.planned) for each in self.interruptions),
            seconds=round(seconds_taken(lives, self.started), 1),
            usd=round(usd, 6),
            faults=(*faults, *(() if usd else ("its Guard counted no dollars",))),
        )


@dataclass(kw_only=True, slots=True)
class ManyRuns:
    """Synthesizes and deploys all runs, then follows them, stepping each in turn."""

    stacks: DeployedStacks
    say: Callable[[str], None]
    count: int
    at_once: int
    kinds: Sequence[str]  # of fleet, in turn
    runs: list[SideRun] = field(default_factory=list)
    _seen: tuple[int, int] | None = None  # how many are deployed, how many have not ended yet
    _changed: float = 0.0
    _next_tick: float = 0.0

    def run(self) -> tuple[list[SideOutcome], list[str]]:
        """Return each run's outcome, and what all runs together left behind."""
        self._prepare()
        bus = EventBus(aws=self.stacks.aws, code_folder=self.stacks.folder / "functions")
        reference = self.stacks.folder / "uninterrupted"
        uninterrupted = TRAINED.start_reference(self.stacks, reference)
        try:
            self._follow(bus)
        finally:
            for each in self.runs:
                each.fleet.close()
        uninterrupted.expect()
        bus.tick()  # so that each Guard counts the last seconds
        bus.close()
        theirs = FolderFiles(folder=reference)
        errors = {each.function: each.error for each in bus.invocations if each.error}
        outcomes = [
            each.outcome(
                theirs,
                [
                    text
                    for name, text in errors.items()
                    if name.startswith(stack_name(PREFIX, f"{each.stack}-"))
                ],
            )
            for each in self.runs
        ]
        return outcomes, self._left()

    def _prepare(self) -> None:
        """Deploy the stacks that all runs share, and upload the dataset."""
        prepare(self.stacks, TRAINED, self._synthesize(1), self._assembly(1), NOTICE_SECONDS)
        size, zone = POOL
        only = Course(size=size, zone=zone, steps=((0.0, float(self.at_once)),))
        self.stacks.aws.capacity.follow([Course(steps=((0.0, 0.0),)), only])

    def _follow(self, bus: EventBus) -> None:
        """Deploy one after the other, each synthesized during the previous deploy."""
        follow = partial(self._step, bus)
        following = None
        for number in range(1, self.count + 1):
            if following is not None:
                following.expect(follow)
            following = self._synthesize(number + 1) if number < self.count else None
            stacks = replace(self.stacks, training=training_stack(f"r{number}"))
            stacks.deploy(self._assembly(number), stacks.training, follow)
            self._begin(bus, stacks, number)
        while not all(each.is_over for each in self.runs):
            follow()
            time.sleep(_POLL_SECONDS)

    def _step(self, bus: EventBus) -> None:
        for each in (each for each in self.runs if not each.is_over):
            each.follow()
        seen = (len(self.runs), sum(not each.is_over for each in self.runs))
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._changed = seen, now
            self.say(f"{seen[0]} of {self.count} deployed, {seen[1]} still running or waiting")
        if now >= self._next_tick and bus.is_idle:
            bus.tick()
            self._next_tick = now + _TICK_SECONDS
        if now > self._changed + _TIMEOUT_SECONDS:
            raise RehearsalFailed(
                f"nothing ended for {_TIMEOUT_SECONDS:g} s; logs: {self.stacks.folder}"
            )

    def _begin(self, bus: EventBus, stacks: DeployedStacks, number: int) -> None:
        """Begin to follow the fleet that has just been deployed."""
        name = f"r{number}"

        def boot(instance: RehearsedInstance) -> BootableMachine:
            quirks = Quirks(environment={**WAITS, **handler_poll(NOTICE_SECONDS)})
            folder = stacks.folder / name
            return stacks.machine(instance, folder, NOTICE_SECONDS, quirks)

        fleet = stacks.fleet(bus, boot, lambda text: self.say(f"{name}: {text}"))
        turn, is_taken = number // EVERY, number % EVERY == 2
        plan = [parse_interruption(LOSSES[turn % len(LOSSES)])] if is_taken else []
        files, stack = stacks.run_files(), stacks.training
        self.runs.append(SideRun(fleet=fleet, files=files, plan=plan, stack=stack))

    def _synthesize(self, number: int) -> Child:
        own = {"name": f"r{number}", "fleet": self.kinds[number % len(self.kinds)]}
        return self.stacks.synthesize(self._assembly(number), {**CONTEXT, **own})

    def _assembly(self, number: int) -> Path:
        return self.stacks.folder / f"r{number}" / "cdk.out"

    def _left(self) -> list[str]:
        """List what still runs in the account or on this host."""
        processes = self.stacks.processes_left(self.stacks.folder)
        instances = instances_of(self.stacks.aws)
        faults = [f"still running: {', '.join(instances)}"] if instances else []
        return [*faults, *([f"{processes} processes were left behind"] if processes else [])]


def many_table(outcomes: list[SideOutcome]) -> Table:
    """Return the runs as a table, each with the dollars that its Guard counted, and their sum."""
    table = Table(title="runs side by side", title_justify="left")
    for name in ("stack", "machines", "taken", "seconds", "spent, $", "equal, nothing left"):
        table.add_column(name, overflow="fold")
    for each in outcomes:
        verdict = "NO: " + "; ".join(each.faults) if each.faults else "yes"
        cells = (str(each.machines), each.taken, f"{each.seconds:.1f}", f"{each.usd:.4f}")
        table.add_row(each.stack, *cells, Text.from_ansi(shown(verdict)))
    table.add_section()
    machines, usd = sum(each.machines for each in outcomes), sum(each.usd for each in outcomes)
    taken = f"{sum(bool(each.taken) for each in outcomes)} of {machines}"
    good = sum(not each.faults for each in outcomes)
    verdict = f"{good} of {len(outcomes)}"
    table.add_row(f"{len(outcomes)} runs", str(machines), taken, "", f"{usd:.4f}", verdict)
    return table
