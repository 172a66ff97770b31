"""How a program saves, ends and begins again, as a seed draws it over users' widths.

A program is a user's own script with a folder of files (docs/your-script.md); what it writes is
real, but tiny, and stands for `state_bytes` of its plan.
"""

import random
from dataclasses import dataclass, replace
from typing import Literal

from tests.stacks.guard.world import HOUR, MINUTE

Kind = Literal["rename", "in place", "numbered", "shards", "pair", "append"]


@dataclass(frozen=True, kw_only=True)
class Habit:
    """What a program does with its folder, with a signal, and with what it finds."""

    kind: Kind
    save_every: float  # seconds; of `append`, between two lines
    write_seconds: float = 0.0  # of one save
    pieces: int = 1  # of a save: shards
    pause_seconds: float = 0.0  # between two of them
    keep_last: int = 1  # saves under names of their own
    deletes_first: bool = False  # the oldest, before it writes the next
    handler: Literal["", "save", "exit", "ignore"] = ""  # of a notice's signal
    handler_code: int = 0  # with which it then ends
    begins: Literal["newest", "from scratch"] = "newest"
    is_silent: bool = False  # it starts over where it cannot read a save
    says_when: bool = False  # it commits, by touching a file
    reports: bool = False  # its steps, in its log
    logs: tuple[str, ...] = ()  # that it appends to
    log_every: float = 60.0
    keeps_open: bool = False  # its logs
    has_database: bool = False  # beside its saves
    has_best: bool = False  # a smaller file, written in place at every third save
    writes_at_start: bool = False  # a file of settings, each time
    crash: Literal["", "start", "step"] = ""  # always
    quiet_seconds: float = 10.0
    look_seconds: float = 0.5  # a folder of many files is looked at less often
    clones: bool = True  # its file system
    has_room: bool = True  # for copies of what it saves
    start_seconds: float = 20.0

    @property
    def has_whole_pauses(self) -> bool:
        """Whether its saves have no pause that a quiet time takes for their end."""
        return self.pause_seconds < 0.8 * self.quiet_seconds

    @property
    def saving_seconds(self) -> float:
        """How long a save takes, with its pauses."""
        return (
            self.write_seconds * (1.5 if self.has_best else 1.0) + self.pieces * self.pause_seconds
        )

    @property
    def seems_to_save(self) -> bool:
        """Whether a file is open that is not known to be a log until it has grown three times.

        A notice then comes, as far as anybody can see, in the middle of a save.
        """
        return self.keeps_open and any(name.endswith(".csv") for name in self.logs)

    @property
    def is_whole(self) -> bool:
        """Whether each file appears as a whole, and is seen to, or the script says when."""
        is_seen = self.keep_last == 1 or self.write_seconds >= self.look_seconds
        return self.says_when or (self.kind == "rename" and is_seen and not self.has_best)

    @property
    def most_unsaved(self) -> float:
        """How long its work may wait for a moment at which it is captured, in seconds."""
        moment = 0.0 if self.says_when else 150.0 + 3 * self.quiet_seconds
        return self.save_every + 2 * self.saving_seconds + moment

    @property
    def overwrites(self) -> bool:
        """Whether a save begins by destroying the one before."""
        is_alone = self.keep_last == 1 and self.deletes_first
        is_in_place = self.kind in ("in place", "pair") or self.has_best
        return is_in_place or (self.kind != "rename" and is_alone)


def log_uniform(luck: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** luck.random())


def draw_habit(luck: random.Random, work: float, state_bytes: float) -> Habit:
    kinds: tuple[Kind, ...] = ("rename", "in place", "numbered", "shards", "pair", "append")
    kind = luck.choices(kinds, [3, 3, 3, 2, 1, 1])[0]
    quiet = luck.choice([10.0, 10.0, 10.0, log_uniform(luck, 2, 60)])
    writes = min(state_bytes / log_uniform(luck, 2e8, 2e9), 10 * MINUTE, work / 16)
    every = max(2 * writes, min(log_uniform(luck, 5, 2 * HOUR), work / 4))
    pieces = {"shards": luck.randint(2, 6), "pair": 2}.get(kind, 1)
    pause = luck.choice([0.0, 0.1, 0.5, 1.5]) * quiet * (pieces > 1)
    logs = luck.choice([(), ("train.log",), ("metrics.csv",), ("events.out.tfevents.1", "a.csv")])
    has_work_left = work < 2 * HOUR
    habit = Habit(
        kind=kind,
        save_every=max(every, 2 * pieces * pause),
        write_seconds=writes,
        pieces=pieces,
        pause_seconds=pause,
        keep_last=luck.choice([1, 2, 2, 4]),
        deletes_first=luck.random() < 0.2,
        handler=luck.choice(["", "", "save", "save", "exit", "ignore"]),
        handler_code=luck.choice([0, 75, 143, 1]),
        begins="from scratch" if has_work_left and luck.random() < 0.1 else "newest",
        is_silent=luck.random() < 0.15,
        says_when=kind != "append" and luck.random() < 0.2,
        reports=luck.random() < 0.5,
        logs=() if kind == "append" else logs,
        log_every=log_uniform(luck, 10, 600),
        keeps_open=luck.random() < 0.5,
        has_database=kind != "append" and luck.random() < 0.15,
        writes_at_start=luck.random() < 0.2,
        crash=luck.choices(["", "start", "step"], [20, 1, 1])[0],  # type: ignore[arg-type]
        quiet_seconds=quiet,
        look_seconds=luck.choice([0.5, 1.0, 2.0]),
        clones=luck.random() < 0.7,
        has_room=luck.random() < 0.9,
        start_seconds=log_uniform(luck, 3, 5 * MINUTE),
        has_best=kind != "append" and luck.random() < 0.2,
    )
    # Of one that tells no steps, commits and fails late, only max_hours would be the end.
    is_late = habit.crash == "step" and (habit.begins != "newest" or every > 4 * MINUTE)
    return replace(habit, crash="") if is_late and not habit.reports else habit
