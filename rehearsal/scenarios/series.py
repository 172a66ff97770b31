"""Many drills on one embedded AWS: set up once, then each drill is a new run id of the stack."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from contract.keys import RECEIPT
from rehearsal.aws import EmbeddedAws
from rehearsal.drill.children import Child, ChildFailed, Children
from rehearsal.drill.deployment import Deployment, RehearsalFailed, synth_arguments
from rehearsal.drill.run_files import FolderFiles
from rehearsal.machines.commands import CommandFailed
from rehearsal.machines.nspawn.host import NspawnHost
from rehearsal.scenarios.scenario import EQUAL, Scenario
from rehearsal.scenarios.trial import Trial
from rehearsal.scenarios.verdict import Ended, find_faults, why

NOTICE_SECONDS = 5.0
CLIPS = 132
# A run of a few seconds with all kinds of stages; scenarios may change what they need.
CONTEXT: Mapping[str, str] = {
    "size": "g5.xlarge",
    "workload": "trajectory",
    "recipe": "laptop",
    "overrides": "single_frame_epochs=1 time_average_epochs=1 shuffled_epochs=1 epochs=20",
    "train.checkpoint_interval": "2epochs",
    "notice_budget_seconds": f"{NOTICE_SECONDS:g}",
    "train.lease_ttl_seconds": "3",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one drill ended; without faults it went as written."""

    name: str
    about: str
    ends: str
    why: str
    machines: int
    guard: int
    seconds: float
    faults: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Series:
    """Rehearses scenarios one after the other; each one's stack is synthesized beside the last."""

    scenarios: Sequence[Scenario]
    folder: Path
    aws: EmbeddedAws
    children: Children
    say: Callable[[str], None]
    nspawn: NspawnHost | None = None  # None: process machines
    _references: dict[str, Child] = field(default_factory=dict)

    @property
    def deployment(self) -> Deployment:
        return Deployment(
            folder=self.folder, aws=self.aws, children=self.children, nspawn=self.nspawn
        )

    def run(self) -> Iterator[Outcome]:
        """Rehearse one after the other; one that breaks does not keep the next from running."""
        started = time.monotonic()
        synthesis = self._synthesize(0)
        making = self.deployment.start_dataset(workload=CONTEXT["workload"], count=CLIPS, seed=0)
        self.deployment.bootstrap()
        synthesis.expect()
        self.deployment.deploy(self._assembly(0), "DatasetStack")
        making.expect()
        self.deployment.upload(CONTEXT["workload"])
        self.aws.capacity.notice_seconds = NOTICE_SECONDS
        self.say(f"ready after {time.monotonic() - started:.1f} s")
        for index, scenario in enumerate(self.scenarios):
            synthesis.wait()
            ready = synthesis
            if index + 1 < len(self.scenarios):
                synthesis = self._synthesize(index + 1)
            yield self._rehearse(index, scenario, ready)

    def _rehearse(self, index: int, scenario: Scenario, synthesis: Child) -> Outcome:
        started = time.monotonic()
        self.say(f"{scenario.name} ...")
        overrides = self._context(index)["overrides"]
        if scenario.expect.ends == EQUAL:
            self._start_reference(overrides)
        folder = self._folder(index)
        with (folder / "rehearsal.log").open("a", encoding="utf-8") as log:
            trial = Trial(
                scenario=scenario,
                deployment=self.deployment,
                context=self._context(index),
                folder=folder,
                say=self.say,
                log=lambda text: print(text, file=log, flush=True),
            )
            try:
                synthesis.expect()
                trial.run(self._assembly(index))
                faults = self._faults(trial, overrides)
            except (RehearsalFailed, ChildFailed, CommandFailed) as error:
                faults = [str(error)]
        if trial.is_deployed and (receipt := trial.run_files.read(RECEIPT)) is not None:
            (folder / RECEIPT).write_bytes(receipt)
        trial.end_what_is_left()
        seconds = time.monotonic() - started
        self.say(f"{scenario.name}: {'; '.join(faults) or 'as written'}, {seconds:.1f} s")
        invocations = trial.fleet.bus.invocations if trial.is_deployed else []
        return Outcome(
            name=scenario.name,
            about=scenario.about,
            ends=scenario.expect.ends,
            why=why(trial.run_files) if trial.is_deployed else "",
            machines=len(trial.fleet.lives) if trial.is_deployed else 0,
            guard=len(invocations),
            seconds=round(seconds, 1),
            faults=tuple(faults),
        )

    def _faults(self, trial: Trial, overrides: str) -> list[str]:
        if trial.scenario.expect.ends == EQUAL:
            self._references[overrides].expect()
        ended = Ended(
            run=trial.run_files,
            reference=FolderFiles(folder=self._reference(overrides)),
            lives=list(trial.fleet.lives.values()),
            deployed=trial.deployed,
            target_capacity=trial.fleet.target_capacity(),
            alive=trial.alive(),
            processes_left=trial.processes_left(),
            guard_errors=[each.error for each in trial.fleet.bus.invocations if each.error],
            undone=trial.undone,
        )
        return find_faults(ended, trial.scenario.expect)

    def _start_reference(self, overrides: str) -> None:
        """Start the uninterrupted run with these overrides, once for all drills that have them."""
        if overrides not in self._references:
            self._references[overrides] = self.deployment.start_reference(
                self._reference(overrides),
                workload=CONTEXT["workload"],
                recipe=CONTEXT["recipe"],
                overrides=overrides,
                interval=CONTEXT["train.checkpoint_interval"],
            )

    def _reference(self, overrides: str) -> Path:
        number = [*self._references, overrides].index(overrides)
        return self.folder / f"uninterrupted-{number}"

    def _context(self, index: int) -> dict[str, str]:
        run_id = {"run_id": f"drill-{index + 1}"}
        return {**CONTEXT, **run_id, **self.scenarios[index].parameters}

    def _folder(self, index: int) -> Path:
        folder = self.folder / self.scenarios[index].name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _assembly(self, index: int) -> Path:
        return self._folder(index) / "cdk.out"

    def _synthesize(self, index: int) -> Child:
        arguments = synth_arguments(self._assembly(index), self._context(index))
        command = ["npx", "--no-install", "cdk", *arguments, "--ci", "--no-color"]
        return self.children.start("cdk synth", command, relayed=lambda line: False)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the drills as a table, with the seconds that each took."""
    table = Table(title="drills", title_justify="left")
    for name in ("drill", "ends in", "machines", "seconds", "as written"):
        table.add_column(name, overflow="fold")
    for each in outcomes:
        verdict = "NO: " + "; ".join(each.faults) if each.faults else "yes"
        ends = f"{each.ends}: {each.why}" if each.why else each.ends
        table.add_row(each.name, ends, str(each.machines), f"{each.seconds:.1f}", verdict)
    total = sum(each.seconds for each in outcomes)
    table.add_section()
    table.add_row("all", "", str(sum(each.machines for each in outcomes)), f"{total:.1f}", "")
    return table


def scenario_table(scenarios: Sequence[Scenario]) -> Table:
    """Return what can be rehearsed."""
    table = Table("drill", "ends in", "machines", "about", title="drills", title_justify="left")
    for each in scenarios:
        table.add_row(each.name, each.expect.ends, each.needs or "any", each.about)
    return table
