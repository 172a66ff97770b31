"""Many drills on one embedded AWS, set up once: each drill is a new run id of the stack."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from contract.keys import RECEIPT
from contract.readable import shown
from rehearsal.demo.children import Child, ChildFailed
from rehearsal.demo.deployment import DeployedStacks
from rehearsal.demo.fleet import RehearsalFailed, instances_of
from rehearsal.demo.grants import keep
from rehearsal.demo.run_files import FolderFiles
from rehearsal.demo.trained import RehearsedWorkload, prepare, stack_context
from rehearsal.drills.drill import EQUAL, Drill
from rehearsal.drills.drill_run import DrillRun, judge, why
from rehearsal.machines.commands import CommandFailed

NOTICE_SECONDS = 5.0
_ROUNDING_USD = 1e-5
# A run of a few seconds with all kinds of stages, whose parameters drills may change.
WORKLOAD = RehearsedWorkload(
    name="trajectory",
    recipe="laptop",
    overrides="tracker_epochs=1 single_frame_epochs=1 time_average_epochs=1 shuffled_epochs=1 "
    "epochs=20",
    count=132,
    checkpoint_interval="2epochs",
)
CONTEXT = stack_context(
    WORKLOAD.context(), size="g5.xlarge", notice_seconds=NOTICE_SECONDS, lease_ttl_seconds=3
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillOutcome:
    """The outcome of one drill; without faults, it went as written."""

    name: str
    about: str
    ends: str
    why: str
    machines: int
    guard: int
    seconds: float
    faults: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class DrillSeries:
    """Rehearses drills one after the other; each stack is synthesized one drill ahead."""

    drills: Sequence[Drill]
    stacks: DeployedStacks
    say: Callable[[str], None]
    kind: str  # of fleet
    _references: dict[str, Child] = field(default_factory=dict)

    def run(self) -> Iterator[DrillOutcome]:
        """Rehearse one after the other; after one that breaks, the next runs all the same."""
        started = time.monotonic()
        synthesis = self._synthesize(0)
        prepare(self.stacks, WORKLOAD, synthesis, self._assembly(0), NOTICE_SECONDS)
        self.say(f"ready after {time.monotonic() - started:.1f} s")
        for index, drill in enumerate(self.drills):
            synthesis.wait()
            ready = synthesis
            if index + 1 < len(self.drills):
                synthesis = self._synthesize(index + 1)
            yield self._rehearse(index, drill, ready)

    def _rehearse(self, index: int, drill: Drill, synthesis: Child) -> DrillOutcome:
        started = time.monotonic()
        self.say(f"{drill.name} ...")
        overrides = self._context(index)["overrides"]
        if drill.expect.ends == EQUAL:
            self._start_reference(overrides)
        folder = self._folder(index)
        with (folder / "rehearsal.log").open("a", encoding="utf-8") as log:
            ran = DrillRun(
                drill=drill,
                stacks=self.stacks,
                context=self._context(index),
                folder=folder,
                say=self.say,
                log=lambda text: print(text, file=log, flush=True),
            )
            try:
                synthesis.expect()
                ran.rehearse(self._assembly(index))
                faults = self._faults(ran, overrides) + self._unaccounted(ran.folder)
            except (RehearsalFailed, ChildFailed, CommandFailed) as error:
                faults = [str(error)]
        if ran.is_deployed and (receipt := ran.run.files.read(RECEIPT)) is not None:
            (folder / RECEIPT).write_bytes(receipt)
        ran.end_what_is_left()
        evidence = self.stacks.aws.access.evidence
        keep(evidence.report(), folder)
        evidence.forget()
        seconds = time.monotonic() - started
        self.say(f"{drill.name}: {'; '.join(faults) or 'as written'}, {seconds:.1f} s")
        invocations = ran.run.fleet.bus.invocations if ran.is_deployed else []
        return DrillOutcome(
            name=drill.name,
            about=drill.about,
            ends=drill.expect.ends,
            why=why(ran.run.files) if ran.is_deployed else "",
            machines=len(ran.run.fleet.lives) if ran.is_deployed else 0,
            guard=len(invocations),
            seconds=round(seconds, 1),
            faults=tuple(faults),
        )

    def _faults(self, ran: DrillRun, overrides: str) -> list[str]:
        if ran.drill.expect.ends == EQUAL:
            self._references[overrides].expect()
        is_faulty = any(each.of == "guard" for each in ran.drill.faults)
        return judge(
            ran.run,
            ran.drill.expect,
            FolderFiles(folder=self._reference(overrides)),
            [
                each.error
                for each in ran.run.fleet.bus.invocations
                if each.error and not (is_faulty and "GuardError" in each.error)
            ],
            alive=list(instances_of(self.stacks.aws)),
            processes_left=self.stacks.processes_left(ran.folder),
            unmet=[f"a request of {each.action}" for each in ran.unmet],
        )

    def _unaccounted(self, folder: Path) -> list[str]:
        """Say where what the money bought, by `runs cost`, does not add up to the bill."""
        file, uri = folder / "cost.json", self.stacks.output(self.stacks.training, "RunUri")
        command = ["bash", "-euc", f"python -m operate cost {uri} --json >{file}"]
        self.stacks.children.start("runs cost", command).expect()
        found = json.loads(file.read_text(encoding="utf-8"))
        sums = [sum(found["goodput"]["usd"].values()), sum(one["usd"] for one in found["machines"])]
        is_equal = abs(sums[0] - sums[1]) < _ROUNDING_USD
        return [] if is_equal else [f"by cause the run cost ${sums[0]:.6f}, in all ${sums[1]:.6f}"]

    def _start_reference(self, overrides: str) -> None:
        """Start the uninterrupted run with these overrides, once for all drills that share them."""
        if overrides not in self._references:
            trained = replace(WORKLOAD, overrides=overrides)
            folder = self._reference(overrides)
            self._references[overrides] = trained.start_reference(self.stacks, folder)

    def _reference(self, overrides: str) -> Path:
        number = [*self._references, overrides].index(overrides)
        return self.stacks.folder / f"uninterrupted-{number}"

    def _context(self, index: int) -> dict[str, str]:
        own = {"run_id": f"drill-{index + 1}", "fleet": self.kind}
        return {**CONTEXT, **own, **self.drills[index].parameters}

    def _folder(self, index: int) -> Path:
        names = [each.name.replace(" ", "-") for each in self.drills[: index + 1]]
        again = names.count(names[-1])
        folder = self.stacks.folder / (names[-1] if again == 1 else f"{names[-1]}-{again}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _assembly(self, index: int) -> Path:
        return self._folder(index) / "cdk.out"

    def _synthesize(self, index: int) -> Child:
        return self.stacks.synthesize(self._assembly(index), self._context(index))


def outcome_table(outcomes: Sequence[DrillOutcome]) -> Table:
    """Return the drills' outcomes as a table."""
    table = Table(title="drills", title_justify="left")
    for name in ("drill", "ends in", "machines", "seconds", "as written"):
        table.add_column(name, overflow="fold")
    for each in outcomes:
        verdict = "NO: " + "; ".join(each.faults) if each.faults else "yes"
        ends = f"{each.ends}: {each.why}" if each.why else each.ends
        cells = (each.name, ends, str(each.machines), f"{each.seconds:.1f}", verdict)
        # As text, not markup: machines have written some of it.
        table.add_row(*(Text.from_ansi(shown(cell)) for cell in cells))
    total = sum(each.seconds for each in outcomes)
    table.add_section()
    table.add_row("all", "", str(sum(each.machines for each in outcomes)), f"{total:.1f}", "")
    return table


def drill_table(drills: Sequence[Drill]) -> Table:
    """Return the drills that can be rehearsed as a table."""
    table = Table("drill", "ends in", "machines", "about", title="drills", title_justify="left")
    for each in drills:
        table.add_row(each.name, each.expect.ends, each.needs or "any", each.about)
    return table
