"""What is promised of a program's snapshots: judged at each commit, deletion, restore and end."""

import json
from typing import TYPE_CHECKING, Any

from contract.keys import BLOBS, blob_key, blob_of, checkpoint_prefix, generation_in
from tests.simulation.disk import Disk, Past, number_of_all
from tests.simulation.habits import Habit
from tests.simulation.scripts import TornError, load
from tests.stacks.guard.world import MINUTE, Machine

if TYPE_CHECKING:
    from tests.simulation.promises import Promised


class ProgramRecord:
    """What the world knows of the program's folder, and of the snapshots that the head names."""

    def __init__(self, world: "Promised", habit: Habit) -> None:
        self.world, self.habit = world, habit
        self.past = Past(logs=frozenset(habit.logs))
        self.steps: dict[str, int | None] = {}  # of each snapshot: None if it cannot be read
        self.numbers: dict[str, int] = {}  # its state
        self.needs: dict[str, set[str]] = {}  # its blobs
        self.spoilt: set[str] = set()  # those that share a blob that was damaged before
        self.firm = 0  # the furthest step of a snapshot that is no crash's
        self.reached = 0  # the step of the program that ran last
        self.is_comparable = False  # what it loses, by nobody's doing but a loss

    def read(self, head: dict[str, Any]) -> int:
        """Judge what the head names newly; return the furthest step that it keeps."""
        named = [each for each in head["checkpoints"] if not each.get("is_left_behind")]
        for entry in named:
            if entry["name"] not in self.steps:
                self._judge(entry)
        firm = [self.steps[one["name"]] or 0 for one in named if not one.get("is_tentative")]
        is_promised = self.is_steady and self.habit.has_whole_pauses and not self._is_excused
        if is_promised and max(firm, default=0) < self.firm:
            self.world.breaks("a commit was lost", f"step {max(firm, default=0)} of {self.firm}")
        self.firm = max(firm, default=0)
        return max((self.steps[one["name"]] or 0 for one in named), default=0)

    @property
    def is_steady(self) -> bool:
        """Whether each life of the program goes on where the last snapshot was."""
        habit = self.habit
        return habit.begins == "newest" and not habit.is_silent

    @property
    def _is_excused(self) -> bool:
        facts = self.world.facts
        return bool(facts["checkpoints damaged"] or facts["head deleted"])

    def _judge(self, entry: dict[str, Any]) -> None:
        world, name = self.world, entry["name"]
        found = world.bucket.found(world.prefix + checkpoint_prefix(name) + "snapshot.json")
        if found is None or not found.data:
            self.steps[name] = None
            return
        manifest = json.loads(found.data)
        self.needs[name] = set(manifest["blobs"])
        files = dict[str, bytes]()
        for one in manifest["files"]:
            content, data = one["content"], b""
            if content["blob"]:
                blob = world.bucket.found(world.prefix + blob_key(content["blob"]))
                if blob is None or blob.data is None:
                    world.breaks("the head names a file that is not there", content["blob"])
                    continue
                if blob.data.startswith(b"??"):
                    self.steps[name] = None
                    self.spoilt.add(name)
                    return
                data = blob.data[content["start"] : content["start"] + content["bytes"]]
            files[one["path"]] = data
        is_tentative, is_said = bool(entry.get("is_tentative")), manifest["program_says_when"]
        self._judge_files(name, files, is_tentative=is_tentative, is_said=is_said)
        world.facts["snapshots"] += 1
        world.facts[f"snapshots {manifest['reason']}"] += 1

    def _judge_files(
        self, name: str, files: dict[str, bytes], *, is_tentative: bool, is_said: bool
    ) -> None:
        world, logs = self.world, self.past.logs
        number = number_of_all({path: data for path, data in files.items() if path not in logs})
        self.numbers[name] = number
        if number not in self.past.states:
            world.breaks("a snapshot is the folder at one moment", name)
        for path in logs & files.keys():
            if not self.past.has_had(path, files[path]):
                world.breaks("a log is as it was", f"{path} in {name}")
        try:
            self.steps[name] = load(files, self.habit)
        except TornError as torn:
            self.steps[name] = None
            is_promised = is_said or self.habit.has_whole_pauses
            if is_promised and self.is_steady and not is_tentative:
                world.breaks("a snapshot holds whole saves", f"{torn} in {name}")

    def deleted(self, name: str) -> None:
        """A blob was deleted."""
        blob = blob_of(name)
        if name != blob_key(blob or ""):
            return  # a second copy
        for snapshot in self.world.named:
            if blob in self.needs.get(snapshot, ()):
                self.world.breaks("a file was deleted that the head names", f"{name}: {snapshot}")

    def judge_restored(self, machine: Machine, disk: Disk) -> None:
        """A program is about to start in a folder that a restore has filled."""
        world = self.world
        named = world.head_now.get("checkpoints", ())
        fit = [one for one in named if not one.get("is_left_behind")]
        names = [one["name"] for one in fit if self.numbers.get(one["name"]) == disk.number]
        for path in self.past.logs & disk.files.keys():
            if not self.past.has_had(path, disk.files[path]):
                world.breaks("a log is as it was", f"{path} on {machine.id}")
        if fit and not names and not world.facts["checkpoints damaged"]:
            world.breaks("what is restored is a snapshot", f"{machine.id} of {len(fit)}")
        newest = fit[-1]["name"] if fit else ""
        passes = [one for one in named if one.get("failed_starts", 0) >= 2]
        excused = self._is_excused or passes or world.was_troubled()
        if names and newest not in names and not excused:
            world.breaks("what is restored is the newest", f"{names[-1]} before {newest}")
        try:
            step = load(disk.files, self.habit)
        except TornError:
            step = 0
            excused = True
        self._judge_loss(step, excused=bool(excused))
        world.tell(f"{machine.id[-4:]} restored {names[-1][:8] if names else 'nothing'}: {step}")

    def _judge_loss(self, step: int, *, excused: bool) -> None:
        """What the last program's end has cost: its work since its last save, and a bit."""
        world, plan = self.world, self.world.plan
        lost = (self.reached - step) * plan.step_seconds
        if lost > self.most_lost and self.is_steady and not excused and not world.troubles:
            text = f"{lost / MINUTE:.1f} of {self.most_lost / MINUTE:.1f} minutes"
            world.breaks("a loss costs the time since the last save", text)

    @property
    def most_lost(self) -> float:
        """How much work may be unsaved, in seconds, where S3 is well."""
        habit, plan = self.habit, self.world.plan
        if habit.kind == "append":
            return habit.most_unsaved + MINUTE + 2 * plan.step_seconds
        rest = habit.save_every - habit.saving_seconds
        copied = plan.state_bytes * min(2, habit.keep_last)
        seconds = 0.0 if habit.clones else copied / 2e9
        changes = habit.has_database and habit.log_every < 2 * seconds
        if seconds > 5.0 and (rest < 2 * habit.quiet_seconds + seconds or changes):
            return 1e9  # it cannot be stopped for so long
        if not (habit.has_room or habit.says_when):
            return 1e9  # what is sent from where it lies may change
        # What all snapshots that are kept need is read back and sent once more.
        is_copied = habit.keep_last >= max(2, plan.keep)
        sending = (4.5 if is_copied else 2.5) * plan.save_seconds + 2 * MINUTE
        return 1.1 * (habit.most_unsaved + 2 * plan.step_seconds + sending)

    def judge_end(self, state: str) -> None:
        """What must hold once all is over."""
        world = self.world
        if state != "finished" or world.facts["ended in trouble"] or world.troubles:
            return
        below = world.prefix + BLOBS
        there = {blob_of(key[len(world.prefix) :]) for key, _ in world.bucket.below(below)}
        needed = set[str]().union(*(self.needs.get(name, set()) for name in world.named))
        # One that cannot be read may need any blob of its generation, or of an earlier one.
        unread = (name for name in world.named if name in world.damaged)
        spared = max((generation_in(name) for name in unread), default=0)
        if left := {blob for blob in there - needed if generation_in(blob) > spared}:
            world.breaks("nothing is stored for nothing", f"{len(left)} blobs, {min(left)}")
