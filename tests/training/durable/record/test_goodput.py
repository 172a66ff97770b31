"""Every paid second of every machine has one cause, and the causes add up to the bill."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.goodput import CAUSES, USEFUL, WAITING, Goodput
from contract.keys import EVENTS, GUARD
from training.durable.record.goodput import goodput_of, read_guard
from training.durable.record.history import History
from training.durable.record.metrics import Metrics
from training.durable.store.folder import FolderStore

ZERO = datetime(2026, 11, 29, tzinfo=UTC).timestamp()
USD_PER_HOUR = 1.2
PLAN = {"size": "g5.xlarge", "share_useful": 0.8, "share_boot": 0.2}


@dataclass
class Scene:
    """A run as its store has it; times are seconds since its first machine was launched."""

    store: FolderStore
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 0

    def machine(self, name: str, began: float, ended: float, **more: Any) -> "Scene":
        self.machines[name] = {
            "launched": ZERO + began,
            "seen": ZERO + ended,
            "usd": (ended - began) / 3600 * USD_PER_HOUR,
            "usd_per_hour": USD_PER_HOUR,
            "is_live": False,
            **more,
        }
        return self

    def says(self, machine: str, at: float, name: str, **more: Any) -> "Scene":
        when = datetime.fromtimestamp(ZERO + at, UTC)
        event = {"time": when.isoformat(), "instance_id": machine, "name": name, **more}
        key = f"{EVENTS}{when:%Y%m%dT%H%M%S.%fZ}-{machine}-{name}.json"
        self.store.put(key, json.dumps(event).encode())
        return self

    def trains(
        self,
        machine: str,
        at: float,
        generation: int,
        *,
        steps: int = 10,
        after: int = 0,
        **more: Any,
    ) -> "Scene":
        """Take the run over, restore for 5 s, then take 2 s for each step, a quarter waiting."""
        own = {"source": "trainer", "generation": generation}
        self.says(machine, at, "take-over", **own)
        self.says(machine, at + 5, "resumed", **own)
        metrics = Metrics(self.store, generation, "n", None)
        for step in range(after + 1, after + steps + 1):
            metrics.write("step", stage="a", step=step, num_samples=8, samples_per_second=4.0,
                          data_wait=0.25)  # fmt: skip
        for kind, fields in more.items():
            metrics.write(kind, stage="a", step=after + steps, **fields)
        metrics.flush()
        metrics.close()
        return self

    def bought(self, *, is_of_program: bool = False) -> Goodput:
        self.store.put(GUARD, json.dumps({"format": 2, "attempts": self.machines}).encode())
        record = SimpleNamespace(workload="program" if is_of_program else "a", prediction=PLAN)
        found = goodput_of(History.read(self.store), record, read_guard(self.store))  # type: ignore[arg-type]
        assert found.planned == {USEFUL: 0.8, "boot": 0.2}
        paid = sum(each["seen"] - each["launched"] for each in self.machines.values())
        bill = sum(each["usd"] for each in self.machines.values())
        assert found.paid_seconds == pytest.approx(paid)
        assert sum(found.usd.values()) == pytest.approx(bill)
        assert sum(found.to_json()["usd"].values()) == pytest.approx(bill, abs=1e-6)
        assert set(found.seconds) <= set(CAUSES)
        assert min(found.seconds.values()) >= 0
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(store=FolderStore(tmp_path))


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {cause: round(value, 3) for cause, value in seconds.items() if round(value, 3)}


def booted(scene: Scene, machine: str, at: float, *, synced: float = 0.0) -> Scene:
    """Boot in 40 s, and wait `synced` seconds for the dataset alone."""
    scene.says(machine, at + 30, "boot-torch", status="ok", seconds=20)
    scene.says(machine, at + 39 + synced, "boot-training", status="ok", seconds=9)
    return scene.says(machine, at + 40 + synced, "boot", status="ok")


def test_a_notice_a_loss_a_wait_and_the_end(scene: Scene) -> None:
    own = {"source": "trainer"}
    booted(scene.machine("i-1", 0, 120), "i-1", 0)
    # 10 steps, of which the next machine repeats none; a save; then a notice without steps.
    scene.trains("i-1", 50, 1, commit={"blocked_seconds": 3.0, "slowed_seconds": 1.0})
    scene.says("i-1", 80, "notice", cause="notice", **own).says("i-1", 90, "released", **own)
    # Later another one, on demand and dearer, which is lost in silence 40 s after its steps.
    booted(scene.machine("i-2", 180, 310, usd=0.09, waited=60.0), "i-2", 180)
    scene.trains("i-2", 230, 2, steps=20, after=10, evaluation={"metrics": {}, "seconds": 7.0})
    # The third goes back to step 20, and finishes.
    booted(scene.machine("i-3", 310, 430), "i-3", 310, synced=20)
    scene.says("i-3", 375, "dataset-synced", **own)
    scene.trains("i-3", 380, 3, steps=10, after=20).says("i-3", 410, "finished", **own)
    scene.says("i-3", 420, "notice", message="its fleet goes to zero")
    found = scene.bought()
    assert rounded(found.seconds) == {
        USEFUL: 10 * 1.5 - 1 + 10 * 1.5 + 10 * 1.5,
        WAITING: 60.0,
        "boot": 50 + 50 + 50.0,
        "sync": 20 + 0.5,
        "restore": 15.0,
        "data_wait": 10 * 0.5 + 10 * 0.5 + 9 * 0.5,
        "saving": 4.0,
        "evaluation": 7.0,
        # Ten steps of the second, and what followed its last line.
        "repeated": 20 + (310 - 282),
        # From 78 on nothing is measured; the notice came at 80.
        "other": 2 + 5.0,
        "notice": 10 + 30.0,
        "idle": 20.0,
    }
    ends = {each.machine: (each.why, each.restart_pays) for each in found.ends}
    assert ends == {"i-1": ("market", True), "i-2": ("unknown", True), "i-3": ("over", None)}
    assert "useful" in found.sentence()


@pytest.mark.parametrize(
    ("message", "why", "pays"),
    [
        ("GPU PCI:0000:00:1e of this machine failed: Xid 79, fallen off the bus (signal, exit "
         "status 9)", "gpu", True),
        ("training failed (exit-code, exit status 74): S3 answered 503", "store", True),
        ("training failed (exit-code, exit status 4): the data volume is gone", "host", True),
        ("training failed (exit-code, exit status 1): ValueError: shapes differ", "script", False),
        ("training failed (signal, exit status 9; the kernel killed a process of it: out of "
         "memory): loss 1.0", "script", False),
        ("boot failed at dataset: the dataset could not be synced (status 74)", "store", True),
        ("boot failed at program: requirement torchfoo==9 cannot be built", "script", False),
        ("boot failed at data-volume: no volume /dev/sdf", "host", True),
    ],
)  # fmt: skip
def test_a_machine_that_failed_says_whose_fault_it_was(
    scene: Scene, message: str, why: str, pays: bool
) -> None:
    scene.machine("i-1", 0, 60).says("i-1", 50, "machine-failed", message=message)
    (end,) = scene.bought().ends
    assert (end.why, end.restart_pays, end.evidence) == (why, pays, message)


def test_a_machine_without_a_run_has_booted_for_nothing(scene: Scene) -> None:
    """One that failed, one that EC2 failed, and one in a stalled sync."""
    scene.machine("i-1", 0, 60).says("i-1", 50, "machine-failed", message="boot failed at torch: x")
    scene.machine("i-2", 60, 90, said="no event machine-failed; EC2 says: Server.InternalError")
    scene.machine("i-3", 90, 400).says("i-3", 130, "boot-torch", status="ok")
    scene.says("i-3", 380, "notice", message="Spot takes this machine back")
    found = scene.bought()
    assert rounded(found.seconds) == {"boot": 50 + 30 + 40.0, "sync": 270.0, "idle": 10.0}
    assert [each.why for each in found.ends] == ["host", "host", "market"]
    assert found.share == 0.0


def test_a_stop_is_no_wait_and_what_boots_after_the_end_is_idle(scene: Scene) -> None:
    own = {"source": "trainer"}
    scene.machine("i-1", 0, 100, is_taken_back=True).trains("i-1", 10, 1)
    scene.says("host", 60, "stopped", source="person", message="from host: lunch")
    scene.says("i-1", 61, "notice", cause="notice", **own).says("i-1", 62, "released", **own)
    scene.machine("i-2", 4000, 4100).trains("i-2", 4010, 2, after=10)
    scene.says("i-2", 4050, "finished", **own)
    scene.machine("i-3", 4060, 4090)
    found = scene.bought()
    assert WAITING not in found.seconds
    assert found.seconds["idle"] == pytest.approx(50 + 30)
    assert [each.why for each in found.ends] == ["stopped", "over", "over"]
    assert found.ends[0].evidence == "from host: lunch"


def test_a_stop_in_a_machines_last_second_is_a_stop(scene: Scene) -> None:
    """EC2 says the end in whole seconds; a stop that ends a machine at once is heard after it."""
    scene.machine("i-1", 0, 100, is_taken_back=True).trains("i-1", 10, 1)
    scene.says("host", 100.7, "stopped", source="person", message="from host: lunch")
    scene.machine("i-2", 200, 300, is_taken_back=True).trains("i-2", 210, 2, after=10)
    assert [each.why for each in scene.bought().ends] == ["stopped", "market"]


def test_a_clock_that_is_wrong_moves_no_second_to_another_machine(scene: Scene) -> None:
    scene.machine("i-1", 0, 100).trains("i-1", 5000, 1).machine("i-2", 100, 200)
    scene.trains("i-2", -5000, 2, after=10)
    assert scene.bought().paid_seconds == 200


def test_of_a_program_only_what_no_snapshot_had_is_lost(scene: Scene) -> None:
    scene.machine("i-1", 0, 100)
    scene.trains("i-1", 20, 1, running={"unsaved_seconds": 12.0})
    scene.machine("i-2", 100, 200).trains("i-2", 120, 2, after=5)
    scene.says("i-2", 190, "finished", source="trainer")
    found = rounded(scene.bought(is_of_program=True).seconds)
    assert found[USEFUL] == 20 - 12 + 190 - 125
    assert found["repeated"] == 12 + (100 - 45)


def test_a_run_without_a_guard_is_what_its_attempts_were(scene: Scene) -> None:
    own = {"source": "trainer"}
    scene.trains("here", 0, 1).says("here", 30, "finished", **own)
    history = History.read(scene.store)
    assert goodput_of(history, None, {}).usd == {}
    found = goodput_of(history, None, {}, usd_per_hour=3600.0)
    assert sum(found.usd.values()) == pytest.approx(30.0)
    assert rounded(found.seconds) == {
        USEFUL: 15.0, "restore": 5.0, "data_wait": 5.0, "other": 5.0
    }  # fmt: skip


def test_of_a_machine_that_runs_what_the_guard_has_not_billed_yet_is_added(scene: Scene) -> None:
    scene.machine("i-1", 0, 100, is_live=True).trains("i-1", 20, 1)
    scene.store.put(GUARD, json.dumps({"attempts": scene.machines, "waiting": 0.0}).encode())
    history, guard = History.read(scene.store), read_guard(scene.store)
    billed = goodput_of(history, None, guard, now=ZERO + 100)
    later = goodput_of(history, None, guard, now=ZERO + 1900)
    assert (billed.paid_seconds, later.paid_seconds) == (100, 1900)
    more = sum(later.usd.values()) - sum(billed.usd.values())
    assert more == pytest.approx(0.5 * USD_PER_HOUR)
    assert later.ends == []
    waiting = goodput_of(history, None, {"waiting": ZERO - 60}, now=ZERO)
    assert waiting.seconds[WAITING] == 60


@pytest.mark.parametrize("text", ["{", "[]", '{"attempts": {"i-1": {}}}', '{"attempts": 3}'])
def test_a_damaged_ledger_is_passed_over(tmp_path: Path, text: str) -> None:
    store = FolderStore(tmp_path)
    store.put(GUARD, text.encode())
    assert read_guard(store) == {}


def test_the_cents_of_the_causes_are_those_of_the_bill() -> None:
    third = dict.fromkeys(["boot", "sync", "restore", USEFUL], 10 / 3)
    rows = list(Goodput(seconds=third, usd=third).rows())
    assert sum(float(text.split(",")[0].removeprefix("$")) for _, _, text, *_ in rows) == 13.33
