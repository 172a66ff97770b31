"""A room's door: others import only the names in `__all__` of its package."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from contract.door import homes
from tests.house import imports_of, sources

REPOSITORY = Path(__file__).parent.parent
# Each room with the most names that its door may have.
DOORS = {
    "embedded_aws": 13,
    "rehearsal": 0,
    "sizing": 60,
    "stacks": 17,
    "training": 51,
    "training.durable": 90,
    "training.proof": 6,
    "training.workloads": 0,
}
INNER = ("training.durable", "training.proof", "training.workloads")


def room_of(module: str) -> str:
    """The innermost room of a module: one of training/'s, or a top-level folder."""
    inner = (room for room in INNER if f"{module}.".startswith(f"{room}."))
    return next(inner, module.partition(".")[0])


def past_the_door(imports: dict[str, list[str]], room: str) -> list[str]:
    """What other rooms' files import from this room although its door does not name it."""
    offered = {f"{room}.{name}" for name in import_module(room).__all__}
    found = []
    for path, imported in imports.items():
        if room_of(path.removesuffix(".py").replace("/", ".")) == room:
            continue
        taken = [each for each in imported if room_of(each) == room]
        found += [f"{path}: {each}" for each in taken if each not in offered]
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, list[str]]:
    return {path: [*imports_of(tree)] for path, tree in sources(REPOSITORY).items()}


@pytest.mark.parametrize("room", DOORS)
def test_others_import_only_what_the_door_names(imports: dict[str, list[str]], room: str) -> None:
    assert past_the_door(imports, room) == []


@pytest.mark.parametrize("room", DOORS)
@pytest.mark.parametrize(
    "way", ["from {0}.inner import name", "import {0}.inner", "from {0} import x"]
)
def test_an_import_past_the_door_is_found(room: str, way: str) -> None:
    planted = {
        f"{other.replace('.', '/')}/planted.py": [*imports_of(ast.parse(way.format(room)))]
        for other in ("app", *DOORS, *INNER)
        if other != room
    }
    assert len(past_the_door(planted, room)) == len(planted)


@pytest.mark.parametrize(("room", "most"), DOORS.items())
def test_a_door_is_narrow_and_names_what_is_there(room: str, most: int) -> None:
    module = import_module(room)
    source = Path(str(module.__file__))
    names = set(homes(source.read_text()))
    assert all(getattr(module, name) is not None for name in names)
    beside = {path.stem for path in source.parent.iterdir()}
    assert not beside & names, "a module of that name would hide it once it is imported"
    # A module that the door names as a whole says in turn what others may use of it.
    whole = [import_module(f"{room}.{name}") for name in set(module.__all__) - names]
    assert len(names.union(*(each.__all__ for each in whole))) <= most


def test_workloads_that_were_written_before_the_door_import_what_they_did() -> None:
    import training
    from training import durable
    from training.artifact_key import artifact_key
    from training.tally import count, timed
    from training.workload import DatasetSamples, Milestones, Settings, Writer, drawing_from

    assert (timed, count) == (durable.Tally.timed, durable.Tally.count)
    before = [DatasetSamples, Milestones, Settings, Writer, drawing_from, artifact_key]
    names = ("DatasetSamples", "Milestones", "Settings", "Writer", "drawing_from", "key_of")
    assert before == [getattr(training, name) for name in names]


@pytest.mark.parametrize("room", DOORS)
def test_the_rooms_readme_names_its_door(room: str) -> None:
    folder = REPOSITORY / room.replace(".", "/")
    words = set(re.findall(r"\w+", (folder / "README.md").read_text()))
    names = {name for name in import_module(room).__all__ if not name.endswith("Error")}
    assert names - words == set()
