"""`predict --images` draws what `predict` finds: on images that are in no dataset."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.training.workloads.detection.exports import SMALL, coco_of_roboflow
from training.cli.main import main
from training.workloads.detection import evaluation


def test_what_is_found_in_ones_own_images_is_drawn_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same boxes as in the dataset's copy of an image; one of a camera stands upright."""
    monkeypatch.chdir(tmp_path)
    coco_of_roboflow(tmp_path / "export")
    assert main(["data", "import", "export", "--workload=detection", "--out=data"]) == 0
    run = ["run", "--workload=detection", "--recipe=laptop", "--dataset-uri=data", "--run-uri=run"]
    # One image alone, of one token on its coarsest level, needs two channels in a group; what is
    # untrained has near ties, which other images in the batch decide.
    small = [text for text in SMALL if not text.startswith("width")] + ["width=64", "eval_batch=1"]
    assert main([*run, *(f"--override={text}" for text in small)]) == 0
    predict = ["predict", "--run-uri=run", "--dataset-uri=data"]
    assert main([*predict, "--out=found.json"]) == 0
    truth = json.loads(Path("data/annotations/instances_validation.json").read_text())
    name, image_id = truth["images"][0]["file_name"], truth["images"][0]["id"]
    own = tmp_path / "own"
    own.mkdir()
    with Image.open(tmp_path / "data/validation" / name) as image:
        image.save(own / "plain.png")
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(own / "turned.jpg", exif=exif)
        size = image.size
    # Nothing is sure after a few steps.
    found = [r for r in json.loads(Path("found.json").read_text()) if r["image_id"] == image_id]
    least = sorted(result["score"] for result in found)[-2]
    monkeypatch.setattr(evaluation, "_LEAST_SCORE", least - 1e-5)
    capsys.readouterr()
    assert main([*predict, "--images=own", "--out=pictures"]) == 0
    assert "[ok] pictures: what was found in 2 images" in capsys.readouterr().out
    strong = [result for result in found if result["score"] >= least]
    names = {each["id"]: number for number, each in enumerate(truth["categories"])}
    with Image.open("pictures/plain.png.png") as drawn, Image.open(own / "plain.png") as plain:
        assert drawn.size == size
        for result in strong:
            x, y, width, height = result["bbox"]
            color = Image.new("RGB", (1, 1), evaluation._color(names[result["category_id"]]))
            # Somewhere along its left and right edges, as much as is within the picture.
            rows = range(max(0, round(y)), min(size[1], round(y + height)))
            for edge in (x, x + width):
                columns = [c for c in range(round(edge) - 1, round(edge) + 2) if 0 <= c < size[0]]
                near = {drawn.getpixel((column, row)) for column in columns for row in rows}
                assert len(columns) < 3 or color.getpixel((0, 0)) in near, (result, size)
        assert drawn.tobytes() != plain.convert("RGB").tobytes()
    with Image.open("pictures/turned.jpg.png") as drawn:
        assert drawn.size == size[::-1]


def test_fails_to_draw_on_what_is_no_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", "--run-uri=run", "--dataset-uri=data", f"--images={tmp_path / 'no'}"]
    assert main([*words, f"--out={tmp_path / 'out'}"]) == 2
    assert "no has no files; pass an image or a folder of images" in capsys.readouterr().err
