"""What an evaluation leaves: pictures side by side below their captions, and tables."""

from pathlib import Path

import numpy as np
from PIL import Image

from training.evaluation_files import Captioned, write_sheet, write_table


def test_pictures_stand_in_rows_below_their_captions(tmp_path: Path) -> None:
    pixels = [np.full((20, 30, 3), shade, np.uint8) for shade in (10, 60, 110)]
    captioned = [Captioned(each, caption="right", color="red") for each in pixels]
    write_sheet(tmp_path / "sheet.png", "three", captioned, num_columns=2)
    with Image.open(tmp_path / "sheet.png") as sheet:
        drawn = np.asarray(sheet).astype(int)
    corners = [np.argwhere((drawn == shade).all(axis=2))[0].tolist() for shade in (10, 60, 110)]
    assert corners[0][0] == corners[1][0] < corners[2][0]
    assert corners[0][1] == corners[2][1] < corners[1][1]
    above = drawn[corners[0][0] - 16 : corners[0][0]]
    assert ((above[..., 0] > 200) & (above[..., 1] < 150)).any(), "a red caption"


def test_no_caption_is_cut_off_nor_runs_into_the_next(tmp_path: Path) -> None:
    """Names of classes may be longer than a picture is wide."""
    pixels, long = np.full((20, 30, 3), 60, np.uint8), "iiiiiiiiiiiiiii, taken for llllllllllllll|"
    for num_columns in (1, 2):
        write_sheet(tmp_path / "sheet.png", "-", [Captioned(pixels, long)] * 2, num_columns)
        with Image.open(tmp_path / "sheet.png") as sheet:
            drawn = np.asarray(sheet.convert("L")).astype(int)
        line = drawn[33:44] < 128
        ends = np.flatnonzero(line.sum(axis=0) >= 10)  # the bar with which each caption ends
        assert len(ends) and ends.max() < drawn.shape[1] - 2
        lefts = np.argwhere(drawn == 60)[:, 1]
        assert num_columns == 1 or (ends < lefts.max() - 30).any(), "the second begins after it"


def test_a_table_has_four_decimals_and_leaves_unknown_cells_empty(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv", ["what", "how much"], [("a, b", 0.5), ("c", None)])
    assert (tmp_path / "table.csv").read_text().splitlines() == [
        "what,how much",
        '"a, b",0.5000',
        "c,",
    ]
