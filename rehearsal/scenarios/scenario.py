"""The format of a drill: docs/rehearsal.md describes it; an unknown or missing name is refused."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args

from rehearsal.aws.capacity import Course, trace_steps
from rehearsal.drill.action import Action, check_choice
from rehearsal.faults import Fault
from rehearsal.machines.quirks import Quirks, Volume

FOLDER = Path(__file__).parent
EQUAL, FAILURE = "equal result", "failure event"
_ENDS = (EQUAL, FAILURE)
PROCESS, NSPAWN = "process", "nspawn"
MACHINES = (PROCESS, NSPAWN)
# AWS's documents disagree on which it is.
REPLACEMENT, IN_PLACE = "replacement", "in place"
# The run's steps of bootstrap.sh go through run_step; the first, the fetch, is cloud-init's own.
FETCH = "fetch"
_Made = TypeVar("_Made")
# The kinds of value that TOML has too; a number without a point may stand for one with.
_TAKES: Mapping[object, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """What is wrong with the machines `which`, counted from 1; without a number, with all."""

    which: tuple[int, ...] = ()
    quirks: Quirks

    def covers(self, number: int) -> bool:
        return not self.which or number in self.which


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """How a run must end; each of `events` (a pattern) must match an event's name and message.

    `within_hours` is from the deploy to the last machine's end.
    """

    ends: str
    machines: int | None = None
    within_hours: float | None = None
    markets: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    events: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One drill; `needs` is the kind of machine that alone can show it, empty for both.

    `fleet_update` is what CloudFormation makes of a new version of the launch template.
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
        check_choice("fleet_update", self.fleet_update, (REPLACEMENT, IN_PLACE))
        if self.guard_is_invoked and any(each.do == "guard" for each in self.actions):
            raise ValueError(
                "do = 'guard' needs guard_is_invoked = false: until then nothing calls it"
            )

    def can_have(self, machine: str) -> bool:
        """Whether machines of this kind can show it; every kind can without a name."""
        return not machine or self.needs in ("", machine)

    def quirks(self, number: int) -> Quirks:
        """Return everything that is wrong with one machine."""
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


def known_scenarios() -> list[Scenario]:
    """Return all drills of this folder, by name."""
    return [found for path in sorted(FOLDER.glob("*.toml")) for found in read_scenarios(path)]


def choose(names: Sequence[str], machine: str = "") -> list[Scenario]:
    """Return the drills with these names, or in these files; all without a name.

    `machine` is the kind that there is: without a name what needs another is left out, with its
    name it is refused.
    """
    if not names:
        return [each for each in known_scenarios() if each.can_have(machine)]
    chosen = [found for name in names for found in _named(name)]
    for each in chosen:
        if not each.can_have(machine):
            raise ValueError(
                f"the drill {each.name} needs machines of kind {each.needs}: add "
                f"--machine {each.needs}"
            )
    return chosen


def _named(name: str) -> list[Scenario]:
    if name.endswith(".toml"):
        return read_scenarios(Path(name))
    known = known_scenarios()
    found = [each for each in known if name in (each.name, each.name.partition(" ")[0])]
    if not found:
        raise ValueError(
            f"unknown drill {name!r}; `python -m rehearsal drill --list` shows them all"
        )
    return found


def read_scenarios(path: Path) -> list[Scenario]:
    """Read a file: one drill, or one for each word of `for_each`, which replaces {each}."""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
        words = document.pop("for_each", None)
        if words is None:
            return [_scenario(path.stem, document, path.parent)]
        found = []
        for word in words:
            document = tomllib.loads(text.replace("{each}", word))
            del document["for_each"]
            found.append(_scenario(f"{path.stem} {word}", document, path.parent))
        return found
    except FileNotFoundError:
        raise ValueError(f"no drill found at {path}") from None
    except (ValueError, re.error) as error:
        raise ValueError(f"{path}: {error}") from error


def _scenario(name: str, document: dict[str, Any], folder: Path) -> Scenario:
    given = dict(document)
    made = {
        "parameters": _texts(given.pop("parameters", {})),
        "capacity": _courses(given.pop("capacity", []), folder),
        "machines": tuple(_machines(each) for each in given.pop("machine", [])),
        "actions": tuple(_action(each, folder) for each in given.pop("action", [])),
        "faults": _faults(given.pop("fault", [])),
        "guard": _texts(given.pop("guard", {})),
        "expect": _expectation(given.pop("expect", {})),
    }
    if "needs" in given:
        check_choice("needs", given["needs"], MACHINES)
    return _build(Scenario, {**given, **made, "name": name}, "a drill")


def _expectation(given: dict[str, Any]) -> Expectation:
    lists: dict[str, Any] = {
        name: _listed(name, given[name]) for name in ("markets", "ranks", "events") if name in given
    }
    expect = _build(Expectation, {**given, **lists}, "[expect]")
    check_choice("ends", expect.ends, _ENDS)
    for pattern in expect.events:
        re.compile(pattern)
    return expect


def _machines(given: dict[str, Any]) -> Machines:
    which = _listed("which", given.pop("which", []))
    programs = dict(given.pop("programs", {}))
    step = given.pop("fails_at", None)
    if step == FETCH:
        programs["aws"] = _FAILING_FETCH
    elif step is not None:
        programs["python3"] = _FAILING_STEP.format(step=step)
    quirks: dict[str, Any] = {
        "programs": programs,
        "files": _texts(given.pop("files", {})),
        "environment": _texts(given.pop("environment", {})),
        "lacks": _listed("lacks", given.pop("lacks", [])),
    }
    if "disks" in given:
        volumes = given.pop("disks")
        quirks["disks"] = tuple(_build(Volume, each, "disks") for each in volumes)
    return Machines(which=which, quirks=_build(Quirks, {**given, **quirks}, "[[machine]]"))


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


def _action(given: dict[str, Any], folder: Path) -> Action:
    lists = {
        "capacity": _courses(given.pop("capacity", []), folder),
        "parameters": _texts(given.pop("parameters", {})),
        "faults": _faults(given.pop("fault", [])),
    }
    return _build(Action, {**given, **lists}, "[[action]]")


def _faults(given: Sequence[dict[str, Any]]) -> tuple[Fault, ...]:
    return tuple(_build(Fault, each, "fault") for each in given)


def _courses(given: Sequence[dict[str, Any]], folder: Path) -> tuple[Course, ...]:
    courses = []
    for each in given:
        values = dict(each)
        if "machines" in values:
            values["steps"] = ((0.0, float(values.pop("machines"))),)
        elif "trace" in values:
            hour = float(values.pop("hour_seconds"))
            values["steps"] = trace_steps(folder / values.pop("trace"), hour_seconds=hour)
        elif "steps" in values:
            values["steps"] = tuple((float(at), float(count)) for at, count in values["steps"])
        courses.append(_build(Course, values, "capacity"))
    return tuple(courses)


def _texts(given: Mapping[str, object]) -> dict[str, str]:
    """Return a table whose values are all texts, as variables are."""
    return {name: str(value) for name, value in given.items()}


def _listed(name: str, value: object) -> tuple[Any, ...]:
    """Return a list as a tuple; a text, which is a sequence too, is refused."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r}; give a list")
    return tuple(value)


def _build(kind: type[_Made], values: Mapping[str, Any], where: str) -> _Made:
    """Build a dataclass; an unknown or missing field is a ValueError that names it."""
    known = {each.name: each.type for each in fields(cast(Any, kind))}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(known)}")
        _check_type(f"{name} of {where}", value, known[name])
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition('() ')[2]}") from None


def _check_type(name: str, value: object, kind: object) -> None:
    """Refuse a text where a number is meant, and the like; what has parts checks them itself."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    taken = [each for known in kinds for each in _TAKES.get(known, ())]
    if taken and type(value) not in taken:
        names = " or ".join(each.__name__ for each in taken)
        raise ValueError(f"{name} is {value!r}; give: {names}")
