"""A drill on deployed stacks: boot, apply its faults, follow it to its end, judge it."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from contract.keys import HEAD, RECEIPT
from embedded_aws import EventBus, Fault
from rehearsal.demo.actions import Action, RehearsedRun
from rehearsal.demo.deployment import DeployedStacks, handler_poll
from rehearsal.demo.fleet import BootableMachine, MachineLife, instances_of, user_data_faults
from rehearsal.demo.receipt import compare_runs, inequalities
from rehearsal.demo.run_files import Files, read_events, read_json
from rehearsal.drills.drill import EQUAL, FAILURE, IN_PLACE, Drill, Expectation
from rehearsal.machines.metadata import RehearsedInstance

# Replaces the Guard's ten minutes in a run of seconds.
_TICK_SECONDS = 4.0
# Shorter waits between a boot's attempts, for the same reason.
WAITS = {"STEP_RETRY_SECONDS": "0.5", "FETCH_ATTEMPTS": "1", "TERMINATE_RETRY_SECONDS": "5"}


@dataclass(kw_only=True, slots=True)
class DrillRun:
    """One drill on its own run id; `context` has its stack's parameters."""

    drill: Drill
    stacks: DeployedStacks
    context: dict[str, str]
    folder: Path
    say: Callable[[str], None]
    log: Callable[[str], None]
    unmet: list[Fault] = field(default_factory=list)
    _run: RehearsedRun | None = None

    @property
    def run(self) -> RehearsedRun:
        assert self._run is not None
        return self._run

    @property
    def is_deployed(self) -> bool:
        return self._run is not None

    def rehearse(self, assembly: Path) -> None:
        """Deploy, follow the run to its end, leave nothing running; raise if it does not end."""
        aws = self.stacks.aws
        self._synthesize()
        aws.update_in_place(["AWS::EC2::SpotFleet"] if self.drill.fleet_update == IN_PLACE else [])
        aws.capacity.reset()
        aws.capacity.follow(self.drill.capacity)
        aws.faults.begin(self.drill.faults)
        self.stacks.deploy(assembly, self.stacks.training)
        folder = self.folder / "functions"
        bus = EventBus(aws=aws, code_folder=folder, variables=self.drill.guard)
        fleet = self.stacks.fleet(bus, self._machine, self._announce)
        bus.invokes = self.drill.guard_is_invoked or not fleet.is_spot
        self._run = RehearsedRun(
            fleet=fleet,
            files=self.stacks.run_files(),
            plan=self.drill.actions,
            say=self._announce,
            do=self._do,
        )
        try:
            fleet.follow(
                self._step,
                relay=self.log,
                tick_seconds=_TICK_SECONDS,
                timeout_seconds=self.drill.timeout_seconds,
                logs=self.folder / "machines",
            )
        finally:
            fleet.close()
            done = self.drill.actions[: self.run.done]
            begun = [*self.drill.faults, *(fault for each in done for fault in each.faults)]
            self.unmet = [fault for fault in begun if fault not in aws.faults.met]
            # First, as closing the bus may raise, and the next drill uses the same AWS.
            aws.faults.end()
            bus.close()

    def _step(self) -> bool:
        """Do the next action if it is due; return whether everything is over."""
        fleet = self.run.fleet
        # Actions after the end wait until all events are delivered: the Guard reacts late.
        is_over = fleet.is_over() and (not self.run.undone or fleet.bus.is_idle)
        return not self.run.step(is_over=is_over) and is_over

    def _do(self, action: Action, life: MachineLife | None) -> None:
        aws, fleet = self.stacks.aws, self.run.fleet
        if life is not None and action.do == "execute":
            # Only process machines have this variable; for others it is empty.
            command = f': "${{MACHINE_ROOT=}}"\n{action.command}'
            self.log(life.machine.execute("bash", "-euc", command))
        elif life is not None and action.do == "rebalance":
            fleet.rebalance(life)
        elif action.do == "capacity":
            aws.capacity.follow(action.capacity)
        elif action.do == "faults":
            aws.faults.begin(action.faults)
        elif action.do == "clock":
            aws.faults.clock_ahead_seconds = action.seconds or 0.0
        elif action.do == "guard":
            fleet.bus.invokes = True
        elif action.do == "operate":
            uri = self.stacks.output(self.stacks.training, "RunUri")
            owner = ["bash", "-euc", action.command]
            self.stacks.children.start("operate", owner, FLEET_ID=fleet.id, RUN_URI=uri).expect()
        elif action.do == "deploy":
            # Keep stepping the fleet: CloudFormation waits for machines that it shuts down.
            assembly = self._assembly(self.run.done)
            self.stacks.deploy(assembly, self.stacks.training, meanwhile=fleet.step)
            fleet.id = self.stacks.fleet(fleet.bus, self._machine, self._announce).id
            fleet.bus.invokes = fleet.bus.invokes or not fleet.is_spot
            fleet.ticks = 0

    def _assembly(self, number: int) -> Path:
        return self.folder / f"cdk.out-{number}"

    def _synthesize(self) -> None:
        """Synthesize what the actions deploy beforehand, as it would take too long in mid-run."""
        for number, action in enumerate(self.drill.actions, start=1):
            if action.do == "deploy":
                context = {**self.context, **action.parameters}
                self.stacks.synthesize(self._assembly(number), context).expect()

    def _machine(self, instance: RehearsedInstance) -> BootableMachine:
        # Groups need the Guard for their first machine, also in a drill without it.
        done = {each.do for each in self.drill.actions[: self.run.done]}
        self.run.fleet.bus.invokes = self.drill.guard_is_invoked or "guard" in done
        quirks = self.drill.quirks(len(self.run.fleet.lives) + 1)
        notice_seconds = self.stacks.aws.capacity.notice_seconds
        environment = {**WAITS, **handler_poll(notice_seconds), **quirks.environment}
        return self.stacks.machine(
            instance,
            self.folder / "machines",
            notice_seconds,
            replace(quirks, environment=environment),
        )

    def _announce(self, text: str) -> None:
        self.say(f"{self.drill.name}: {text}")
        self.log(text)

    def end_what_is_left(self) -> None:
        """Terminate every instance, so that the next drill finds none."""
        if alive := list(instances_of(self.stacks.aws)):
            self.stacks.aws.client("ec2").terminate_instances(InstanceIds=alive)


def judge(
    run: RehearsedRun,
    expect: Expectation,
    reference: Files,
    guard_errors: Sequence[str] = (),
    *,
    alive: Sequence[str] = (),
    processes_left: int = 0,
    unmet: Sequence[str] = (),
) -> list[str]:
    """List the differences from the expectation; empty after a drill that went as written.

    `reference` has the uninterrupted run's files.
    """
    files, lives = run.files, list(run.fleet.lives.values())
    head, events = read_json(files, HEAD) or {}, read_events(files)
    is_equal = expect.ends == EQUAL
    faults = _equality(files, reference, head) if is_equal else _failure(head, events)
    faults += () if is_equal else files.rules_broken()
    for pattern in expect.events:
        if not any(re.search(pattern, event_text(event)) for event in events):
            faults.append(f"no event matches {pattern!r}")
    markets = tuple(life.instance.market for life in lives)
    attempts = (read_json(files, RECEIPT) or {}).get("machines", [])
    ranks = tuple(attempt["ranks"] for attempt in attempts)
    # From the deploy to the last machine's end, also if no machine ever booted.
    hours = seconds_taken(lives, run.started) / 3600
    capacity, undone = run.fleet.target_capacity(), [*run.undone, *unmet]
    checks = {
        f"{len(lives)} machines booted, not {expect.machines}": expect.machines
        not in (None, len(lives)),
        f"the machines' markets were {', '.join(markets)}": bool(expect.markets)
        and markets != expect.markets,
        f"the attempts' ranks were {', '.join(map(str, ranks))}": bool(expect.ranks)
        and ranks != expect.ranks,
        f"it took {hours:.4f} hours, too long": expect.within_hours is not None
        and hours > expect.within_hours,
        f"the fleet's target is {capacity}, not 0": capacity > 0,
        f"still running: {', '.join(alive)}": bool(alive),
        f"{processes_left} processes were left behind": processes_left > 0,
        f"the Guard failed: {'; '.join(guard_errors[:1])}": bool(guard_errors),
        f"never happened: {', '.join(undone)}": bool(undone),
    }
    others = user_data_faults(lives)
    return [*faults, *others, *(text for text, broken in checks.items() if broken)]


def seconds_taken(lives: Iterable[MachineLife], deployed: float) -> float:
    """Return the seconds from the deploy to the last machine's end."""
    return max([deployed, *(life.ended or 0.0 for life in lives)]) - deployed


def why(run: Files) -> str:
    """Return the last failure, in the words of the head or of an event."""
    head = read_json(run, HEAD) or {}
    failures = [str(event["message"]) for event in read_events(run) if _is_failure(event, head)]
    return str(head.get("reason") or (failures[-1] if failures else ""))


def _is_failure(event: Mapping[str, Any], head: Mapping[str, Any]) -> bool:
    """Whether an event says that something failed or that the Guard stopped the run, and why."""
    is_stop = event.get("name") == "to-zero" and head.get("state") != "finished"
    is_bad = event.get("status") == "failed" or event.get("name") == "terminated" or is_stop
    return is_bad and bool(event.get("message"))


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event's text for patterns: its name, its message, and quotes of other events."""
    return " ".join([f"{event.get('name')}: {event.get('message', '')}", *event.get("said", [])])


def _failure(head: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    faults = []
    if head.get("state") == "finished":
        faults.append(f"the run finished, but a {FAILURE} was expected")
    if not any(_is_failure(event, head) for event in events):
        faults.append("no event says that anything failed, or why")
    return faults


def _equality(run: Files, reference: Files, head: Mapping[str, Any]) -> list[str]:
    if head.get("state") != "finished":
        state = f"{head['state']}: {head.get('reason')}" if head else f"new: {why(run)}"
        return [f"the run did not finish ({state})"]
    ours, theirs = read_json(run, RECEIPT), read_json(reference, RECEIPT)
    if ours is None or theirs is None:
        return ["a finished run has no receipt.json"]
    return inequalities(compare_runs(run, reference, ours, theirs))
