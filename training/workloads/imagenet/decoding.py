"""A JPEG -> uint8 pixels [H, W, 3]: by simplejpeg or, where it is not installed, by Pillow.

Both are libjpeg-turbo and give the same bits (a test compares them); simplejpeg takes a third less
time. torchvision's decoders are deprecated since 0.29.
"""

import io
import logging
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_simplejpeg = import_module("simplejpeg") if find_spec("simplejpeg") else None
if _simplejpeg is None:
    logging.getLogger(__name__).warning(
        "simplejpeg is not installed: Pillow decodes the images, in half as much time again"
    )


def decode(jpeg: bytes) -> Tensor:
    """The image in RGB, uint8 [H, W, 3]; ValueError if it is none, or not all of it."""
    if _simplejpeg is not None:
        try:
            return torch.from_numpy(_simplejpeg.decode_jpeg(jpeg, strict=True))
        except ValueError:
            pass  # what libjpeg warns of is not always damage: Pillow decides it everywhere
    return torch.from_numpy(decode_with_pillow(jpeg))


def decode_with_pillow(jpeg: bytes) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """The same from Pillow alone."""
    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no JPEG: {error}") from error
