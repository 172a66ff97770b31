"""A room's door: others import only the names in `__all__` of its package."""

import ast
from pathlib import Path

import pytest

from benchmarks.house import sources
from contract.door import homes

REPOSITORY = Path(__file__).parent.parent
# Each room with the most names that its door may have.
DOORS: dict[str, int] = {"training": 53, "training.workloads": 0}
ROOMS = sorted(
    {*DOORS, "training", "training.durable", "training.proof", "training.workloads"},
    key=len,
    reverse=True,
)


def room_of(module: str) -> str:
    """The innermost room of a module: a top-level folder, or a room in it."""
    inner = (room for room in ROOMS if f"{module}.".startswith(f"{room}."))
    return next(inner, module.partition(".")[0])


def past_the_door(files: dict[str, ast.Module], room: str) -> list[str]:
    """Return what other rooms' files import from this room although its door does not name it."""
    named = set(homes((REPOSITORY / room.replace(".", "/") / "__init__.py").read_text()))
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files
    }
    found = []
    for name, tree in files.items():
        if room_of(name.removesuffix(".py").replace("/", ".")) == room:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                taken = [each.name for each in node.names if room_of(each.name) == room]
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = [f"{node.module}.{each.name}" for each in node.names]
                inside = [each for each in whole if room_of(each) == room]
                taken = [
                    each
                    for each in inside
                    if each in modules
                    or node.module != room
                    or each.rpartition(".")[2] not in named
                ]
            else:
                continue
            found += [f"{name}: {each}" for each in taken]
    return found


@pytest.mark.parametrize("room", DOORS)
def test_others_import_only_what_the_door_names(room: str) -> None:
    assert past_the_door(sources(REPOSITORY), room) == []


@pytest.mark.parametrize(("room", "most"), DOORS.items())
def test_a_door_names_what_it_loads_and_stays_narrow(room: str, most: int) -> None:
    folder = REPOSITORY / room.replace(".", "/")
    module = __import__(room, fromlist=["__all__"])
    names = homes((folder / "__init__.py").read_text())
    assert sorted(names) == sorted(module.__all__)
    assert len(names) <= most
    beside = {path.stem for path in folder.iterdir()}
    assert not beside & set(names), "a module of that name would hide it once it is imported"
    assert all(getattr(module, name) is not None for name in names)


def test_workloads_that_were_written_before_the_door_import_what_they_did() -> None:
    import training
    from training.artifact_key import artifact_key
    from training.workload import DatasetSamples, Milestones, Settings, Writer, drawing_from

    before = [DatasetSamples, Milestones, Settings, Writer, drawing_from, artifact_key]
    names = ("DatasetSamples", "Milestones", "Settings", "Writer", "drawing_from", "key_of")
    assert before == [getattr(training, name) for name in names]
