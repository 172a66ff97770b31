"""A painted box stays under its box, whatever is drawn; sizes are the reference's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from training.workloads.detection.samples import Augmentation, _resized

SMALL = Augmentation(
    scales=(40, 60, 90, 160),
    longest_side=200,
    crop_scales=(60, 100),
    crop_sides=(30, 80),
    eval_scale=160,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    height=st.integers(20, 220),
    width=st.integers(20, 220),
    place=st.tuples(*[st.floats(0, 1)] * 4),
)
def test_a_painted_box_stays_under_its_box(
    seed: int, height: int, width: int, place: tuple[float, float, float, float]
) -> None:
    x, y = int(place[0] * (width - 1)), int(place[1] * (height - 1))
    w = 1 + int(place[2] * (width - 1 - x))
    h = 1 + int(place[3] * (height - 1 - y))
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[y : y + h, x : x + w] = 255
    view = SMALL.drawn(height, width, generator(seed))
    seen = np.asarray(view.of(Image.fromarray(pixels)))[..., 0] / 255
    assert seen.shape == (view.height, view.width)
    boxes, is_kept = view.boxes(torch.tensor([[x, y, w, h]], dtype=torch.float64))
    cx, cy, bw, bh = boxes[0].double().tolist()
    left, right = (cx - bw / 2) * view.width, (cx + bw / 2) * view.width
    top, bottom = (cy - bh / 2) * view.height, (cy + bh / 2) * view.height
    assert is_kept.tolist() == [bw * view.width >= 1 - 1e-6 and bh * view.height >= 1 - 1e-6]
    # Resampling blurs an edge over as much as a pixel of either image.
    blur = (view.bottom - view.top) / view.height
    reach = 1 + max(1.0, 1 / blur)
    columns, rows = np.arange(view.width) + 0.5, np.arange(view.height) + 0.5
    far = (columns < left - reach) | (columns > right + reach)
    assert not seen[:, far].any()
    assert not seen[(rows < top - reach) | (rows > bottom + reach)].any()
    inside = seen[np.ix_((rows > top + reach) & (rows < bottom - reach),
                         (columns > left + reach) & (columns < right - reach))]  # fmt: skip
    assert (inside > 0.99).all()


@pytest.mark.parametrize("seed", range(50))
def test_a_view_lies_in_its_image_and_has_a_size_of_the_recipe(seed: int) -> None:
    height, width = torch.randint(20, 700, (2,), generator=generator(seed)).tolist()
    view = SMALL.drawn(height, width, generator(seed + 1000))
    assert 0 <= view.left < view.right <= width
    assert 0 <= view.top < view.bottom <= height
    assert max(view.height, view.width) <= 200
    assert min(view.height, view.width) in SMALL.scales or max(view.height, view.width) >= 198


def test_views_are_a_function_of_the_generator_and_use_all_kinds() -> None:
    views = [Augmentation().drawn(480, 640, generator(seed)) for seed in range(200)]
    assert views == [Augmentation().drawn(480, 640, generator(seed)) for seed in range(200)]
    assert 70 < sum(view.is_flipped for view in views) < 130
    cropped = [view for view in views if view.right - view.left < 640]
    assert 60 < len(cropped) < 130
    assert {min(view.height, view.width) for view in views} == set(Augmentation().scales)


@pytest.mark.parametrize(
    ("height", "width", "shorter", "longest", "expected"),
    [
        (480, 640, 800, 1333, (800, 1066)),
        (640, 480, 800, 1333, (1066, 800)),
        (427, 640, 800, 1333, (800, 1199)),
        (300, 900, 800, 1333, (444, 1332)),
        (500, 500, 600, None, (600, 600)),
        (1, 3000, 800, 1333, (1, 1333)),
    ],
)
def test_sizes_are_those_of_the_reference(
    height: int, width: int, shorter: int, longest: int | None, expected: tuple[int, int]
) -> None:
    assert _resized(height, width, shorter, longest) == expected


def test_an_evaluated_image_is_whole() -> None:
    view = Augmentation().whole(480, 640)
    assert view == (0, 0, 640, 480, 800, 1066, False)
    boxes, is_kept = view.boxes(torch.tensor([[64.0, 48.0, 128.0, 96.0]]))
    assert boxes.tolist() == [pytest.approx([0.2, 0.2, 0.2, 0.2])]
    assert is_kept.tolist() == [True]


def test_a_box_of_less_than_a_pixel_is_dropped_and_others_are_cut_at_the_border() -> None:
    tiny = Augmentation(scales=(50,), eval_scale=50, crop=0.0, longest_side=50)
    view = tiny.whole(100, 100)
    x_y_w_h = [[0, 0, 1.9, 50], [0, 0, 2, 50], [98.1, 0, 9, 50], [-30, 10, 50, 20], [5, 5, 0, 9]]
    boxes, is_kept = view.boxes(torch.tensor(x_y_w_h, dtype=torch.float64))
    assert is_kept.tolist() == [False, True, False, True, False]
    assert boxes[3].tolist() == pytest.approx([0.1, 0.2, 0.2, 0.2])
