"""One drill on deployed stacks: boot, break what the scenario breaks, follow the run to its end."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from cloudformation import schema
from rehearsal.aws.event_bus import EventBus
from rehearsal.drill.children import run_cdk
from rehearsal.drill.deployment import DeployedStacks, handler_poll, synth_arguments
from rehearsal.drill.fleet import BootableMachine, Fleet, MachineLife, RunningInstance
from rehearsal.drill.run_files import BucketFiles
from rehearsal.faults import Fault
from rehearsal.scenarios.action import Action, Seen
from rehearsal.scenarios.scenario import IN_PLACE, Scenario

# The Guard's ten minutes, as short as a run of seconds needs.
_TICK_SECONDS = 4.0
# What a boot waits for between attempts, as short.
WAITS = {"STEP_RETRY_SECONDS": "0.5", "FETCH_ATTEMPTS": "1", "TERMINATE_RETRY_SECONDS": "5"}


@dataclass(kw_only=True, slots=True)
class ScenarioTrial:
    """One scenario on its own run id; `context` is what its stack was synthesized with."""

    scenario: Scenario
    stacks: DeployedStacks
    context: dict[str, str]
    folder: Path
    say: Callable[[str], None]
    log: Callable[[str], None]
    done: int = 0
    deployed: float = 0.0
    acted: float = 0.0
    unmet: list[Fault] = field(default_factory=list)
    _fleet: Fleet | None = None
    _run: BucketFiles | None = None

    @property
    def fleet(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    @property
    def run_files(self) -> BucketFiles:
        assert self._run is not None
        return self._run

    @property
    def is_deployed(self) -> bool:
        return self._run is not None

    @property
    def undone(self) -> list[str]:
        """The actions whose moment never came, and the faults that no request met."""
        actions = [f"{each.do} at {each.at}" for each in self.scenario.actions[self.done :]]
        return [*actions, *(f"a request of {each.action}" for each in self.unmet)]

    def run(self, assembly: Path) -> None:
        """Deploy, follow the run to its end, leave nothing running; raise if it has no end."""
        aws = self.stacks.aws
        self._synthesize()
        in_place = {"AWS::EC2::SpotFleet"} if self.scenario.fleet_update == IN_PLACE else set()
        schema.IN_PLACE.clear()
        schema.IN_PLACE.update(in_place)
        aws.capacity.reset()
        aws.capacity.follow(self.scenario.capacity)
        aws.faults.begin(self.scenario.faults)
        self.stacks.deploy(assembly, self.stacks.training)
        bus = EventBus(
            aws=aws,
            code_folder=self.folder / "functions",
            variables=self.scenario.guard,
            invokes=self.scenario.guard_is_invoked,
        )
        self._fleet = self.stacks.fleet(bus, self._machine, self._tell)
        self._run = self.stacks.run_files()
        try:
            self._follow()
        finally:
            self.fleet.close()
            done = self.scenario.actions[: self.done]
            begun = [*self.scenario.faults, *(fault for each in done for fault in each.faults)]
            self.unmet = [fault for fault in begun if fault not in aws.faults.met]
            # Before what may raise: the next drill has the same AWS.
            aws.faults.end()
            bus.close()

    def _follow(self) -> None:
        self.deployed = self.acted = time.monotonic()

        def is_over() -> bool:
            for life in self.fleet.running():
                life.read_metrics()
            # What is done after the end waits until all is told: the Guard answers to it late.
            is_over = self.fleet.is_over() and (not self.undone or self.fleet.bus.is_idle)
            return not self._act(is_over=is_over) and is_over

        self.fleet.follow(
            is_over,
            tell=self.log,
            tick_seconds=_TICK_SECONDS,
            timeout_seconds=self.scenario.timeout_seconds,
            logs=self.folder / "machines",
        )

    def _act(self, *, is_over: bool) -> bool:
        """Do the next action if it is due; return whether it was."""
        if self.done == len(self.scenario.actions):
            return False
        action = self.scenario.actions[self.done]
        candidates: list[MachineLife | None] = [
            life for life in self.fleet.running() if life.ends_at is None
        ]
        for life in candidates or ([] if action.is_to_machine else [None]):
            seen = Seen(
                line={} if life is None else life.latest,
                log=() if life is None else life.machine.log_lines(),
                seconds=time.monotonic() - self.acted,
                is_over=is_over,
            )
            if action.is_due(seen):
                self.done += 1
                self._tell(f"{action.do} at {action.at}")
                self._do(action, life)
                self.acted = time.monotonic()
                return True
        return False

    def _do(self, action: Action, life: MachineLife | None) -> None:
        aws = self.stacks.aws
        if life is not None and action.is_to_machine:
            self._do_to_machine(action, life)
        elif action.do == "capacity":
            aws.capacity.follow(action.capacity)
        elif action.do == "faults":
            aws.faults.begin(action.faults)
        elif action.do == "clock":
            aws.faults.clock_ahead_seconds = action.seconds or 0.0
        elif action.do == "guard":
            self.fleet.bus.invokes = True
        elif action.do == "operate":
            uri = f"s3://{self.run_files.bucket}/{self.run_files.prefix}"
            command = ("bash", "-euc", action.command)
            self.stacks.children.start(
                "operate", command, FLEET_ID=self.fleet.id, RUN_URI=uri
            ).expect()
        elif action.do == "deploy":
            # Its machines are followed: CloudFormation waits for those that it shuts down.
            assembly = self._assembly(self.done)
            self.stacks.deploy(assembly, self.stacks.training, meanwhile=self.fleet.step)
            latest = self.stacks.fleet(self.fleet.bus, self._machine, self._tell)
            self.fleet.id, self.fleet.arn = latest.id, latest.arn

    def _assembly(self, number: int) -> Path:
        return self.folder / f"cdk.out-{number}"

    def _synthesize(self) -> None:
        """Synthesize what the actions deploy, which in mid-run would take a part of the run."""
        for number, action in enumerate(self.scenario.actions, start=1):
            if action.do == "deploy":
                arguments = synth_arguments(
                    self._assembly(number), {**self.context, **action.parameters}
                )
                run_cdk(self.stacks.children, "cdk synth", *arguments)

    def _do_to_machine(self, action: Action, life: MachineLife) -> None:
        if action.do == "execute":
            # Only process machines have it; elsewhere paths begin with nothing.
            command = f': "${{MACHINE_ROOT=}}"\n{action.command}'
            self.log(life.machine.execute("bash", "-euc", command))
        elif action.do == "rebalance":
            self.fleet.rebalance(life)
        else:
            capacity = self.stacks.aws.capacity
            usual = capacity.notice_seconds
            capacity.notice_seconds = usual if action.seconds is None else action.seconds
            self.fleet.interrupt(life, notice=action.do == "notice")
            capacity.notice_seconds = usual

    def _machine(self, instance: RunningInstance) -> BootableMachine:
        quirks = self.scenario.quirks(len(self.fleet.lives) + 1)
        notice_seconds = self.stacks.aws.capacity.notice_seconds
        environment = {**WAITS, **handler_poll(notice_seconds), **quirks.environment}
        return self.stacks.machine(
            instance,
            self.folder / "machines",
            notice_seconds,
            replace(quirks, environment=environment),
        )

    def _tell(self, text: str) -> None:
        self.say(f"{self.scenario.name}: {text}")
        self.log(text)

    def alive(self) -> list[str]:
        """Return the ids of the instances that EC2 still runs, whoever started them."""
        states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        found = self.stacks.aws.client("ec2").describe_instances(Filters=states)
        return [
            item["InstanceId"]
            for reservation in found["Reservations"]
            for item in reservation["Instances"]
        ]

    def end_what_is_left(self) -> None:
        """Terminate every instance, so that no drill finds another one's."""
        if alive := self.alive():
            self.stacks.aws.client("ec2").terminate_instances(InstanceIds=alive)

    def processes_left(self) -> int:
        """Return how many processes of this drill's machines still run."""
        return self.stacks.processes_left(self.folder)
