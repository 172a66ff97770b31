"""The tokens' places: positions, centres and padding, against the reference's masks and sums."""

import math

import torch
import torch.nn.functional as F

from training.workloads.detection.decoder import pyramid, sines

_SIZES = torch.tensor([[96, 128], [50, 128], [96, 70]])
_PADDED = (96, 128)
_MAPS = [torch.randn(3, 8, 96 // stride, 128 // stride) for stride in (8, 16, 32, 64)]


def _masks() -> list[torch.Tensor]:
    """Where each level is padding: the image's mask, sampled by torch's nearest neighbour."""
    rows, columns = torch.arange(96)[:, None], torch.arange(128)
    is_padding = (rows >= _SIZES[:, :1, None]) | (columns >= _SIZES[:, 1:, None])
    shapes = [each.shape[2:] for each in _MAPS]
    return [F.interpolate(is_padding[None].float(), size=shape)[0].bool() for shape in shapes]


def test_padding_is_what_the_nearest_pixel_says() -> None:
    found = pyramid(_MAPS, _SIZES, _PADDED)
    expected = torch.cat([mask.flatten(1) for mask in _masks()], dim=1)
    assert torch.equal(found.is_padding_BS, expected)
    assert torch.equal(found.tokens_BSD[:, :192], _MAPS[0].flatten(2).transpose(1, 2))
    assert found.shapes == ((12, 16), (6, 8), (3, 4), (1, 2))


def test_positions_are_counted_over_the_valid_area() -> None:
    expected = []
    for mask in _masks():
        places = []
        for axis in (1, 2):
            count = (~mask).cumsum(axis, dtype=torch.float32)
            end = count[:, -1:] if axis == 1 else count[:, :, -1:]
            angle = count / (end + 1e-6) * 2 * math.pi
            pairs = [angle / 20 ** (2 * pair / 4) for pair in range(2)]
            places += [part for each in pairs for part in (each.sin(), each.cos())]
        expected.append(torch.stack(places, dim=-1).flatten(1, 2))
    found = pyramid(_MAPS, _SIZES, _PADDED)
    is_valid = ~found.is_padding_BS
    wanted = torch.cat(expected, dim=1)
    torch.testing.assert_close(
        found.positions_BSD[is_valid], wanted[is_valid], rtol=1e-4, atol=1e-5
    )


def test_centres_and_shares_are_those_of_the_valid_cells() -> None:
    found = pyramid(_MAPS, _SIZES, _PADDED)
    # Image 2 is 70 of 128 pixels wide: 9, 5, 3 and 2 of 16, 8, 4 and 2 cells.
    torch.testing.assert_close(
        found.valid_BL2[2], torch.tensor([[9 / 16, 1], [5 / 8, 1], [3 / 4, 1], [1, 1]])
    )
    # Its second row's third token.
    torch.testing.assert_close(found.centres_BS2[2, 18], torch.tensor([2.5 / 9, 1.5 / 12]))
    sizes = [0.05] * 192 + [0.1] * 48 + [0.2] * 12 + [0.4] * 2
    torch.testing.assert_close(found.sizes_S, torch.tensor(sizes))


def test_maps_that_do_not_divide_the_image_have_no_padding_in_them() -> None:
    maps = [torch.randn(1, 8, 13, 17), torch.randn(1, 8, 7, 9)]
    found = pyramid(maps, torch.tensor([[100, 130]]), (100, 130))
    assert not found.is_padding_BS.any()
    assert (found.valid_BL2 == 1).all()


def test_sines_alternate_with_cosines_of_the_same_wavelength() -> None:
    found = sines(torch.tensor([[0.25, 0.5]]), num=4, temperature=100.0)
    angles = [math.pi / 2, math.pi / 20, math.pi, math.pi / 10]
    expected = [part for angle in angles for part in (math.sin(angle), math.cos(angle))]
    torch.testing.assert_close(found, torch.tensor([expected]))
