"""One call of the Guard: what it knows, what it did, what failed.

Everything is tried independently: a failed call leaves its fact unknown and stops nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stacks.guard import fleet, records
from stacks.guard.budget import Budget, budget_name, period_of
from stacks.guard.fleet import StackInstance
from stacks.guard.ledger import Ledger, Note
from stacks.guard.settings import GuardSettings

DONE_STATES = frozenset(["finished", "failed"])
# The longest that a call takes (the function's timeout): until then it sends its own notes.
CALL_SECONDS = 180.0
# What S3 answers until somebody changes a policy, a key or a bucket's name.
LASTING = (
    "(AccessDenied)", "(NoSuchBucket)",
    "(KMS.DisabledException)", "(KMS.KMSInvalidStateException)", "(KMS.NotFoundException)",
)  # fmt: skip
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Tick:
    """The facts of one call. None, or a fleet missing from `capacity`, could not be read."""

    settings: GuardSettings
    now: float
    instances: list[StackInstance] | None = None  # of the stack, of any run
    fleet_id: str | None = None  # of the stack's fleet; empty if it has none
    is_new: bool = False  # that fleet begins empty, and nobody has requested its machine yet
    capacity: dict[str, int] = field(default_factory=dict)  # by fleet; 0 if cancelled or gone
    on_demand: dict[str, int] = field(default_factory=dict)  # the part of it on demand
    head: dict[str, Any] | None = None
    head_written: float = 0.0
    is_headless: bool = False  # the run has begun, but its head is missing
    ledger: Ledger = field(default_factory=Ledger)
    unkept: list[Callable[[Ledger], None]] = field(default_factory=list)  # changes of this call
    lost: str = ""  # what says that no version of guard.json, or of the budget, can be read
    is_read: bool = True  # whether what the ledger says of earlier calls is known
    given_up: dict[str, str] = field(default_factory=dict)  # by machines that could not mark it
    budget: Budget | None = None  # this period's, if the run has one and it can be read
    done: list[tuple[str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def known(self, what: str, call: Callable[[], T]) -> T | None:
        """Return what a call returns; if it fails, None, and its error is reported at the end."""
        try:
            return call()
        # Errors from damaged documents too: a Guard that raises here would guard nothing.
        except Exception as error:
            self.failed.append(f"{what}: {type(error).__name__}: {error}")
            self.lost = str(error) if isinstance(error, records.LedgerLostError) else self.lost
            return None

    def does(self, what: str, call: Callable[[], None]) -> bool:
        """Return whether a call succeeds; its error is reported at the end."""

        def succeeds() -> bool:
            call()
            return True

        return self.known(what, succeeds) is True

    def look(self) -> None:
        """Read instances, fleets, head and events; bring the ledger up to date with them."""
        settings = self.settings
        self.instances = self.known("instances", lambda: fleet.instances_of_stack(settings))
        own_id = self.fleet_id = self.known("fleet id", lambda: fleet.own_fleet_id(settings))
        own = [each for each in self.instances or () if each.run_id == settings.run_id]
        fleets = {self.fleet_of(each) for each in self.live()} | {self.fleet_id or ""}
        for fleet_id in sorted(fleets):  # a set has another order in each process
            self._look_at_fleet(fleet_id)
        if self.fleet_id is None:
            # The run's instances name their fleets, too.
            wanted = [each.fleet_id for each in own if self.capacity.get(each.fleet_id)]
            self.fleet_id = wanted[0] if wanted else None
        if self.fleet_id and self.capacity.get(self.fleet_id) == 0:
            own_fleet = fleet.StackFleet.of(self.fleet_id)
            self.is_new = self.known("new fleet", own_fleet.is_new) is True
        found = self.known("head", lambda: records.read_head(settings))
        if found is not None:
            self.head, self.head_written = found
        self._look_at_ledger(own, own_id or "")
        if self.head == {}:
            ran = [each.launched < self.ledger.head_seen for each in self.live()]
            saved = self.known("checkpoints", lambda: records.has_checkpoints(settings))
            self.is_headless = any(ran) or bool(saved)
        if settings.budget_name and self.is_read:
            self.budget = self.known("budget", self._charge)

    @property
    def refusal(self) -> str:
        """How S3 refused the head, if that does not pass by itself; else empty."""
        said = next((each for each in self.failed if each.startswith("head: ")), "")
        return said if any(code in said for code in LASTING) else ""

    @property
    def is_kept(self) -> bool:
        """Whether guard.json has every change of this call."""
        return not self.unkept

    @property
    def last_word(self) -> float:
        """When the head was written; of one that was deleted, when a call last saw it."""
        return self.head_written or self.ledger.head_seen

    @property
    def heard(self) -> dict[str, float]:
        """When the lease's holder last wrote the head; a person may change one without a holder."""
        head = self.head or {}
        is_held = head.get("state") == "running"
        return {str(head.get("writer")): self.head_written} if is_held else {}

    def live(self) -> list[StackInstance]:
        """Return the stack's instances that run, of any run."""
        return [each for each in self.instances or () if each.is_live]

    def fleet_of(self, instance: StackInstance) -> str:
        """Return the id of an instance's fleet; the stack's own where it has no tag."""
        return instance.fleet_id or self.fleet_id or ""

    def unwanted(self) -> list[str]:
        """Return on-demand instances beyond their fleet's share whose place Spot has taken.

        A decrease ends Spot instances only: the other machine would wait for the run's lease.
        """
        found = []
        for fleet_id, on_demand in self.on_demand.items():
            own = [each for each in self.live() if self.fleet_of(each) == fleet_id]
            spot = sum(each.market == fleet.SPOT and each.is_running for each in own)
            if self.capacity[fleet_id] and spot >= self.capacity[fleet_id] - on_demand:
                rest = [each for each in own if each.is_on_demand]
                found += sorted(rest, key=lambda each: each.launched)[on_demand:]
        return [each.id for each in found]

    def update(self, change: Callable[[Ledger], None]) -> None:
        """Change the ledger; if guard.json cannot be written, this call's copy.

        What it did not take is kept with the next change.
        """
        changes = [*self.unkept, change]

        def make(ledger: Ledger) -> None:
            for each in changes:
                each(ledger)

        kept = self.known("ledger", lambda: records.update_ledger(self.settings, make))
        if kept is not None:
            self.ledger, self.unkept, self.is_read = kept, [], True
            return
        if self.is_kept:
            found = self.known("guard.json", partial(records.read_ledger, self.settings))
            self.ledger, self.is_read = found[0] if found else self.ledger, found is not None
        self.unkept.append(change)
        change(self.ledger)

    def note(
        self, note: Note, *, again_after: float, also: Callable[[Ledger], None] = lambda _: None
    ) -> None:
        """Keep a note to send once: only one of two concurrent calls claims its key.

        It replaces one of its key that still awaits what it tells of. `also` is kept with it.
        """

        def keep(ledger: Ledger) -> None:
            rest = [each for each in ledger.notes if each.key != note.key or not each.awaits]
            is_awaited = len(rest) < len(ledger.notes)
            if ledger.claim(note.key, self.now, again_after=again_after) or is_awaited:
                ledger.notes = [*rest, note]
            also(ledger)

        self.update(keep)

    def send_notes(self) -> None:
        """Send the notes of this call, and those that another could not send."""
        left = {}
        for note in self.ledger.notes:
            # Of an older one that it is sent could not be kept: each call would send it again.
            is_left = self.is_kept and self.now - note.time > CALL_SECONDS
            if not note.awaits and (note.time == self.now or is_left):
                unsent = [way for way in note.ways if not self._is_sent(note, way)]
                left[note.key, note.time] = unsent

        def settle(ledger: Ledger) -> None:
            for note in ledger.notes:
                note.ways = left.get((note.key, note.time), note.ways)
            ledger.notes = [note for note in ledger.notes if note.ways]

        if left:
            self.update(settle)

    def _is_sent(self, note: Note, way: str) -> bool:
        send = {"event": records.record_event, "mail": records.publish}[way]
        return self.does(f"{way} {note.name}", lambda: send(self.settings, note))

    def _charge(self) -> Budget:
        """Charge the budget with what the run has spent, and may spend before the next call."""
        billed = round(self.ledger.billed_in(period_of(self.settings, self.now)), 6)
        own, name = self.settings.run_id, budget_name(self.settings, self.now)
        charge = partial(Budget.charge, run_id=own, billed=billed, ahead=round(self.usd_ahead, 6))
        return records.update_kept(self.settings, name, Budget, charge)

    @property
    def usd_ahead(self) -> float:
        """Dollars until the next call could end the run's machines, or that of a fleet to come."""
        settings, is_wanted = self.settings, self.is_new or any(self.capacity.values())
        hourly = self.ledger.usd_per_hour or is_wanted * settings.planned_usd_per_hour
        return hourly * settings.tick_seconds / 3600

    def _look_at_fleet(self, fleet_id: str) -> None:
        if fleet_id:
            found = self.known("fleet", fleet.StackFleet.of(fleet_id).read_capacity)
            if found is not None:
                self.capacity[fleet_id], self.on_demand[fleet_id] = found
        elif self.fleet_id == "":
            self.capacity[""] = 0

    def _look_at_ledger(self, own: list[StackInstance], own_id: str) -> None:
        head = self.head or {}
        committed = self.known("commits", lambda: records.last_commit(self.settings, head)) or 0.0
        live = [each.id for each in own if each.is_live]
        read = partial(records.progress_of, self.settings)
        done = {each: self.known("progress", partial(read, each)) for each in live}
        prices = self.known("Spot prices", lambda: fleet.spot_prices(own)) or {}

        def observe(ledger: Ledger) -> None:
            ledger.note_limits(self.settings)
            if self.instances is not None:
                # One that ends with its fleet at zero is not at fault: a group says no more of it.
                # Nor is one whose fleet a deploy has replaced.
                ledger.take_back(
                    each.id
                    for each in own
                    if (self.capacity.get(fleet_id := self.fleet_of(each)) == 0
                        or (own_id and fleet_id != own_id))
                    and each.id in ledger.attempts
                    and ledger.attempts[each.id].is_live
                )  # fmt: skip
                ledger.observe(self.settings, own, self.now, prices, self.heard)
                ledger.note_progress(done, self.now)
                ledger.unwanted = {
                    each: ledger.unwanted.get(each, self.now) for each in self.unwanted()
                }
            ledger.observe_fleets(self.capacity, self.fleet_id, self.now)
            ledger.committed = max(committed, ledger.committed)
            ledger.head_seen = self.now if head else ledger.head_seen
            if self.head is not None:
                patience = self.settings.heartbeat_timeout_seconds
                ledger.note_look(self.now, patience, self.settings.tick_seconds)
            if head.get("state") in DONE_STATES and ledger.barren_attempts():
                ledger.stopped = self.now  # a reopened run begins a new series

        self.update(observe)
        since = max(self.ledger.events_read - records.CLOCKS_DIFFER_SECONDS, 0.0)
        events = self.known("events", partial(records.machine_events, self.settings, since))
        if events is None:
            return
        steps = {each: (records.BOOT_STEP, events.steps.get(each, 0)) for each in live}
        known = self.ledger.attempts
        # One that came and went while no call looked is not known, and has left the fleet at zero.
        is_at_rest = since > 0 and self.ledger.stopped == self.now
        self.given_up = {
            name: said for name, _, said in events.given_up if is_at_rest or name in known
        }

        def record(ledger: Ledger) -> None:
            ledger.record_failures(events.failures, self.now)
            ledger.note_progress(steps, self.now)

        self.update(record)
