"""The format of a drill: docs/rehearsal.md describes it; an unknown or missing name is refused."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin

from embedded_aws import Course, Fault
from rehearsal.demo.actions import Action, check_choice
from rehearsal.demo.fleet import KINDS
from rehearsal.machines.quirks import Quirks, Volume
from sizing import read_spot_counts

FOLDER = Path(__file__).parent
EQUAL, FAILURE = "equal result", "failure event"
_ENDS = (EQUAL, FAILURE)
PROCESS, NSPAWN = "process", "nspawn"
MACHINES = (PROCESS, NSPAWN)
# What an update of the fleet does, on which AWS's documents disagree.
REPLACEMENT, IN_PLACE = "replacement", "in place"
# bootstrap.sh runs its steps through run_step, except the first, the fetch, which is cloud-init's.
FETCH = "fetch"
_Made = TypeVar("_Made")
# TOML's types for a field's type; an integer may stand for a float.
_TAKES: Mapping[object, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    tuple: (list,),
    Mapping: (dict,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The quirks of the machines `which`, counted from 1; by default of all."""

    which: tuple[int, ...] = ()
    quirks: Quirks

    def covers(self, number: int) -> bool:
        return not self.which or number in self.which


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """How a run must end; each of `events` (patterns) must match an event's name and message.

    `within_hours` counts from the deploy to the last machine's end.
    """

    ends: str
    machines: int | None = None
    within_hours: float | None = None
    markets: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("ends", self.ends, _ENDS)
        for pattern in self.events:
            re.compile(pattern)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """One drill; `needs` is the only kind of machine that can show it, empty if both can.

    `fleet_update` is how CloudFormation updates the fleet for a new launch template version.
    """

    name: str
    about: str
    expect: Expectation
    parameters: Mapping[str, str] = field(default_factory=dict)
    capacity: tuple[Course, ...] = ()
    machines: tuple[Machines, ...] = ()
    actions: tuple[Action, ...] = ()
    faults: tuple[Fault, ...] = ()
    needs: str = ""
    guard: Mapping[str, str] = field(default_factory=dict)
    guard_is_invoked: bool = True
    fleet_update: str = REPLACEMENT
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.needs:
            check_choice("needs", self.needs, MACHINES)
        check_choice("fleet_update", self.fleet_update, (REPLACEMENT, IN_PLACE))
        if self.guard_is_invoked and any(each.do == "guard" for each in self.actions):
            raise ValueError(
                "do = 'guard' starts the Guard's calls: it needs guard_is_invoked = false"
            )

    def can_have(self, machine: str) -> bool:
        """Whether machines of this kind can show it; True for an empty kind."""
        return not machine or self.needs in ("", machine)

    def quirks(self, number: int) -> Quirks:
        """Return all quirks of one machine."""
        found = [each.quirks for each in self.machines if each.covers(number)]
        programs = {name: text for each in found for name, text in each.programs.items()}
        environment = {name: text for each in found for name, text in each.environment.items()}
        files = {path: text for each in found for path, text in each.files.items()}
        return Quirks(
            programs=programs,
            files=files,
            environment=environment,
            lacks=tuple(package for each in found for package in each.lacks),
            disks=next((each.disks for each in found if each.disks is not None), None),
            memory_mib=next((each.memory_mib for each in found if each.memory_mib), None),
        )


def known_drills(kind: str = "") -> list[Drill]:
    """Return all drills of this folder, by name."""
    return [found for path in sorted(FOLDER.glob("*.toml")) for found in read_drills(path, kind)]


def choose(names: Sequence[str], machine: str = "", kind: str = "") -> list[Drill]:
    """Return the drills with these names or in these files, by default all.

    `machine` is the available kind: a drill that needs another is refused if it was named, and left
    out otherwise. `kind` is that of the fleet, by default a Spot fleet.
    """
    if not names:
        return [each for each in known_drills(kind) if each.can_have(machine)]
    chosen = [found for name in names for found in _named(name, kind)]
    for each in chosen:
        if not each.can_have(machine):
            raise ValueError(
                f"the drill {each.name} needs machines of kind {each.needs}: add "
                f"--machine {each.needs}"
            )
    return chosen


def _named(name: str, kind: str) -> list[Drill]:
    if name.endswith(".toml"):
        return read_drills(Path(name), kind)
    known = known_drills(kind)
    found = [each for each in known if name in (each.name, each.name.partition(" ")[0])]
    if not found:
        raise ValueError(
            f"unknown drill {name!r}; `python -m rehearsal drill --list` shows them all"
        )
    return found


def read_drills(path: Path, kind: str = "") -> list[Drill]:
    """Read a file: one drill, or one for each word of `for_each`, which replaces {each}.

    A table named after the kind of fleet replaces the drill's fields where that kind differs.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = _parse(text, kind)
        words = document.pop("for_each", None)
        if words is None:
            return [_build(Drill, {**document, "name": path.stem}, path.parent)]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"for_each is {words!r}; it must be a list of words")
        found = []
        for word in words:
            document = _parse(text.replace("{each}", word), kind)
            del document["for_each"]
            document["name"] = f"{path.stem} {word}"
            found.append(_build(Drill, document, path.parent))
        return found
    except FileNotFoundError:
        raise ValueError(f"no drill found at {path}") from None
    except (ValueError, re.error) as error:
        raise ValueError(f"{path}: {error}") from error


def _parse(text: str, kind: str) -> dict[str, Any]:
    document = tomllib.loads(text)
    own = {each: document.pop(each, {}) for each in KINDS}
    return {**document, **own.get(kind, {})}


# The names of tables in messages.
_TABLES: Mapping[type, str] = {
    Drill: "a drill",
    Expectation: "[expect]",
    Machines: "[[machine]]",
    Quirks: "[[machine]]",
    Volume: "disks",
    Action: "[[action]]",
    Fault: "fault",
    Course: "capacity",
}
# In TOML, a list of tables has the name of a single one.
_LISTS = {"machine": "machines", "action": "actions", "fault": "faults"}
_SIGNED = "seconds of [[action]]"  # negative if a clock is behind
_FAILING_FETCH = """case "$*" in
*bundle.zip) echo "fatal error: rehearsed" >&2; exit 1 ;;
esac
exec "$real" "$@"
"""
_FAILING_STEP = """case " $* " in
*" userdata.run_step {step} "*)
    exec "$real" -m userdata.run_step {step} sh -c 'echo "rehearsed: {step} fails"; exit 1' ;;
esac
exec "$real" "$@"
"""


def _boot_steps() -> list[str]:
    """Return the steps at which a boot can fail."""
    script = (FOLDER.parents[1] / "userdata/bootstrap.sh").read_text(encoding="utf-8")
    step = r"^ *(?:step|python3 -m userdata\.run_step) ([a-z-]+)"
    return [FETCH, *re.findall(step, script, re.MULTILINE)]


def _build(kind: type[_Made], table: Mapping[str, Any], folder: Path) -> _Made:
    """Build a dataclass; raise a ValueError that names an unknown or missing field."""
    where = _TABLES[kind]
    known = {each.name: each.type for each in fields(cast(Any, kind))}
    values = {}
    for name, value in _by_field(kind, table, folder).items():
        of = name if name in known else _LISTS.get(name)
        if of not in known:
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(known)}")
        values[of] = _read(known[of], value, f"{name} of {where}", folder)
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition('() ')[2]}") from None


def _read(kind: Any, value: Any, name: str, folder: Path) -> Any:
    """Convert a value to its field's type; refuse another type, such as text for a number."""
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]  # the other is None
    origin = Mapping if is_dataclass(kind) else get_origin(kind) or kind
    taken = _TAKES[origin]
    if type(value) not in taken:
        names = " or ".join(each.__name__ for each in taken)
        raise ValueError(f"{name} is {value!r}; expected {names}")
    if origin in (int, float) and not (math.isfinite(value) and (value >= 0 or name == _SIGNED)):
        raise ValueError(f"{name} is {value}; use a finite number of at least 0")
    if is_dataclass(kind):
        return _build(cast(Any, kind), value, folder)
    if origin is tuple:
        return tuple(_read(get_args(kind)[0], each, name, folder) for each in value)
    # Tables hold texts, such as the values of variables.
    return {key: str(each) for key, each in value.items()} if origin is Mapping else value


def trace_steps(path: Path, *, hour_seconds: float) -> tuple[tuple[float, float], ...]:
    """Read a Spot trace (skypilot-org/spot-traces), with an hour scaled to `hour_seconds`."""
    if not hour_seconds > 0:
        raise ValueError(f"hour_seconds is {hour_seconds}; it must be above 0")
    gap, counts = read_spot_counts(path)
    scale = gap / 3600 * hour_seconds
    changes = [0, *(i for i in range(1, len(counts)) if counts[i] != counts[i - 1])]
    return tuple((index * scale, counts[index]) for index in changes)


def _by_field(kind: type, table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a table with the names of the fields, with shorthands written out."""
    given = dict(table)
    if kind is Machines:
        programs = dict(
            _read(Mapping, given.pop("programs", {}), "programs of [[machine]]", folder)
        )
        step = given.pop("fails_at", None)
        if step is not None:
            check_choice("fails_at", step, _boot_steps())
        if step == FETCH:
            programs["aws"] = _FAILING_FETCH
        elif step is not None:
            programs["python3"] = _FAILING_STEP.format(step=step)
        return {"which": given.pop("which", []), "quirks": {**given, "programs": programs}}
    if kind is Course and "machines" in given:
        given["steps"] = [[0.0, given.pop("machines")]]
    elif kind is Course and "trace" in given:
        if "hour_seconds" not in given:
            raise ValueError("capacity has a trace; it needs hour_seconds, too")
        hour = _read(float, given.pop("hour_seconds"), "hour_seconds of capacity", folder)
        trace = _read(str, given.pop("trace"), "trace of capacity", folder)
        steps = trace_steps(folder / trace, hour_seconds=hour)
        given["steps"] = [list(step) for step in steps]
    elif kind is Drill:
        given.setdefault("expect", {})
    return given
