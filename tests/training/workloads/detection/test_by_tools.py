"""What other tools write is read as the tool itself reads it, box by box."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.training.workloads.detection import coco_scene as scene
from tests.training.workloads.detection.by_tools import TOOLS, Boxes, lay_out

# labelme's masks are of whole pixels; others round to two digits, or to whole pixels (VOC).
PIXELS = {"labelme": 1.0, "label_studio_voc": 1.0}
MODULES = {"label-studio-sdk": "label_studio_sdk"}


def _assert_equal(folder: Path, expected: Boxes, within: float) -> None:
    checked = scene.checked(folder)
    assert checked.report.refusals == []
    found: Boxes = {}
    for split in checked.splits:
        for row, file in enumerate(split.files.tolist()):
            name = (split.folder / file).relative_to(folder).as_posix()
            own = split.objects(row)
            pairs = zip(split.labels[own].tolist(), split.boxes[own].tolist(), strict=True)
            found[name] = [
                [split.categories[label].name, x, y, x + w, y + h] for label, (x, y, w, h) in pairs
            ]
    assert found.keys() == expected.keys()
    for name, boxes in expected.items():
        assert [kind for kind, *_ in sorted(found[name])] == [kind for kind, *_ in sorted(boxes)]
        for (_, *ours), (_, *theirs) in zip(sorted(found[name]), sorted(boxes), strict=True):
            assert ours == pytest.approx(theirs, abs=within)


@pytest.mark.parametrize("name", TOOLS)
def test_what_a_tool_has_written_is_what_it_reads(name: str, tmp_path: Path) -> None:
    _assert_equal(tmp_path, lay_out(name, tmp_path), PIXELS.get(name, 0.02))


@pytest.mark.parametrize("name", TOOLS)
def test_what_is_kept_of_a_tool_is_what_it_writes_today(name: str, tmp_path: Path) -> None:
    package, make = TOOLS[name]
    if find_spec(MODULES.get(package, package)) is None:
        pytest.skip(f"needs {package}, which no lock has: tests/.../by_tools.py")
    (tmp_path / "made").mkdir()
    _assert_equal(tmp_path / "made", make(tmp_path / "made"), PIXELS.get(name, 0.02))
