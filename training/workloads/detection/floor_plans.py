"""Draws floor plans with their walls and rooms: small, but not clean.

Plans are a little askew; walls are thick or thin, filled or hatched, with doors in them;
rooms have furniture; the paper has stains and noise. Some images have no plan at all. The generator
determines the drawing. Imports no torch.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from training.workloads.detection.coco import Category

CATEGORIES = (Category(1, "wall"), Category(2, "room"))
WALL, ROOM = (category.id for category in CATEGORIES)
# Sides of an image, in pixels.
_SIDES = (112, 160)
_EMPTY_SHARE = 0.1
# Drawn this many times larger, then reduced, for smooth edges.
_SCALE = 3
# Rooms whose longer side is below the first are not divided; no room's side is below the second.
_DIVISIBLE, _SMALLEST = 66, 28

_Box: TypeAlias = tuple[float, float, float, float]
_Points: TypeAlias = npt.NDArray[np.float64]


class _FloorPlan(NamedTuple):
    """An image and its objects: category id and (x, y, width, height) in pixels."""

    image: Image.Image
    objects: list[tuple[int, _Box]]


class _Rectangle(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def corners(self) -> _Points:
        left, top, right, bottom = self
        return np.array([(left, top), (right, top), (right, bottom), (left, bottom)], np.float64)


def draw_floor_plan(rng: np.random.Generator) -> _FloorPlan:
    """Draw an image with sides within `_SIDES`; return it with its walls and rooms."""
    width, height = rng.integers(_SIDES[0], _SIDES[1] + 1, 2).tolist()
    sheet = _Sheet(width, height, rng)
    sheet.stain(int(rng.integers(2, 7)))
    objects = []
    if rng.random() >= _EMPTY_SHARE:
        objects = _draw_plan(sheet, rng)
    return _FloorPlan(image=sheet.image(), objects=objects)


def _draw_plan(sheet: "_Sheet", rng: np.random.Generator) -> list[tuple[int, _Box]]:
    margins = rng.uniform(5, 22, 4)
    outer = _Rectangle(margins[0], margins[1], sheet.width - margins[2], sheet.height - margins[3])
    thickness = float(rng.uniform(4.5, 8.5))
    rooms, walls = _divided(outer, thickness, rng)
    sheet.turn(float(rng.uniform(-2.5, 2.5)))
    tints = rng.integers(205, 256, (len(rooms), 3))
    for room, tint in zip(rooms, tints.tolist(), strict=True):
        sheet.polygon(room.corners(), fill=tuple(tint))
        sheet.furnish(room)
    ink = tuple(rng.integers(0, 110, 3).tolist())
    is_hatched = bool(rng.random() < 0.3)
    for wall in walls:
        sheet.wall(wall, ink, is_hatched=is_hatched)
    for wall in walls[4:]:
        sheet.door(wall, thickness)
    found = [(WALL, wall) for wall in walls] + [(ROOM, room) for room in rooms]
    return [(category, sheet.extent(rectangle.corners())) for category, rectangle in found]


def _divided(
    outer: _Rectangle, thickness: float, rng: np.random.Generator
) -> tuple[list[_Rectangle], list[_Rectangle]]:
    """Return rooms and walls: the four outer walls first, then those between rooms."""
    left, top, right, bottom = outer
    walls = [
        _Rectangle(left, top, right, top + thickness),
        _Rectangle(left, bottom - thickness, right, bottom),
        _Rectangle(left, top, left + thickness, bottom),
        _Rectangle(right - thickness, top, right, bottom),
    ]
    inside = _Rectangle(left + thickness, top + thickness, right - thickness, bottom - thickness)
    rooms, open_rooms = [], [inside]
    while open_rooms:
        room = open_rooms.pop()
        longer = max(room.width, room.height)
        if longer < _DIVISIBLE or (room != inside and rng.random() < 0.35):
            rooms.append(room)
            continue
        at = float(rng.uniform(_SMALLEST, longer - _SMALLEST - thickness))
        if room.width >= room.height:
            wall = _Rectangle(room.left + at, room.top, room.left + at + thickness, room.bottom)
            halves = [room._replace(right=wall.left), room._replace(left=wall.right)]
        else:
            wall = _Rectangle(room.left, room.top + at, room.right, room.top + at + thickness)
            halves = [room._replace(bottom=wall.top), room._replace(top=wall.bottom)]
        walls.append(wall)
        open_rooms += halves
    return rooms, walls


class _Sheet:
    """A sheet of paper to draw on, in pixels of the finished image."""

    def __init__(self, width: int, height: int, rng: np.random.Generator) -> None:
        self.width, self.height = width, height
        self._rng = rng
        self._center = np.array([width / 2, height / 2])
        self._turn = np.eye(2)
        paper = tuple(rng.integers(215, 256, 3).tolist())
        self._image = Image.new("RGB", (width * _SCALE, height * _SCALE), paper)
        self._draw = ImageDraw.Draw(self._image)

    def turn(self, degrees: float) -> None:
        """Rotate everything that is drawn from now on."""
        sine, cosine = np.sin(np.radians(degrees)), np.cos(np.radians(degrees))
        self._turn = np.array([[cosine, sine], [-sine, cosine]])

    def _placed(self, points: _Points) -> _Points:
        placed: _Points = (points - self._center) @ self._turn + self._center
        return placed

    def extent(self, points: _Points) -> _Box:
        """Return the box around a drawn polygon, within the sheet."""
        placed = np.clip(self._placed(points), 0, (self.width, self.height))
        (left, top), (right, bottom) = placed.min(axis=0).tolist(), placed.max(axis=0).tolist()
        return left, top, right - left, bottom - top

    def _scaled(self, points: _Points) -> list[tuple[float, float]]:
        # A pixel's centre is half a pixel from its border.
        return [(x, y) for x, y in (self._placed(points) * _SCALE - 0.5).tolist()]

    def polygon(self, points: _Points, fill: Any) -> None:
        self._draw.polygon(self._scaled(points), fill=fill)

    def line(self, points: _Points, color: Any, width: float = 1.0) -> None:
        self._draw.line(self._scaled(points), fill=color, width=max(1, round(width * _SCALE)))

    def stain(self, count: int) -> None:
        """Draw marks of all kinds that do not belong to a plan."""
        for _ in range(count):
            x, y = self._rng.uniform(0, (self.width, self.height))
            w, h = self._rng.uniform(2, 14, 2)
            color = tuple(self._rng.integers(90, 220, 3).tolist())
            if self._rng.random() < 0.5:
                self.line(np.array([(x, y), (x + w, y + h)]), color)
            else:
                self.polygon(_Rectangle(x, y, x + w / 2, y + h / 2).corners(), fill=color)

    def wall(self, wall: _Rectangle, ink: Any, *, is_hatched: bool) -> None:
        """Draw a wall, filled or hatched between its two lines."""
        corners = wall.corners()
        if not is_hatched:
            return self.polygon(corners, fill=ink)
        self.polygon(corners, fill=(235, 235, 235))
        for start in _steps(wall):
            self.line(start, ink, 0.8)
        return self.line(np.concatenate([corners, corners[:1]]), ink, 1.2)

    def door(self, wall: _Rectangle, thickness: float) -> None:
        """Draw an opening in a wall between rooms, with the leaf of the door."""
        length = max(wall.width, wall.height)
        size = float(self._rng.uniform(8, 13))
        at = float(self._rng.uniform(2, max(2.1, length - size - 2)))
        if wall.width > wall.height:
            opening = _Rectangle(wall.left + at, wall.top, wall.left + at + size, wall.bottom)
            leaf = np.array([(opening.left, wall.bottom), (opening.left, wall.bottom + size)])
        else:
            opening = _Rectangle(wall.left, wall.top + at, wall.right, wall.top + at + size)
            leaf = np.array([(wall.right, opening.top), (wall.right + size, opening.top)])
        self.polygon(opening.corners(), fill=(245, 245, 240))
        self.line(leaf, (60, 60, 60), thickness / 6)

    def furnish(self, room: _Rectangle) -> None:
        """Draw tables, beds and rugs, as outlines or filled."""
        for _ in range(int(self._rng.integers(0, 4))):
            w, h = self._rng.uniform(5, 16, 2)
            if w + 6 > room.width or h + 6 > room.height:
                continue
            x = float(self._rng.uniform(room.left + 2, room.right - w - 2))
            y = float(self._rng.uniform(room.top + 2, room.bottom - h - 2))
            corners = _Rectangle(x, y, x + w, y + h).corners()
            color = tuple(self._rng.integers(60, 200, 3).tolist())
            if self._rng.random() < 0.5:
                self.polygon(corners, fill=color)
            else:
                self.line(np.concatenate([corners, corners[:1]]), color, 0.8)

    def image(self) -> Image.Image:
        """Return the sheet as a noisy scan."""
        reduced = self._image.resize((self.width, self.height), Image.Resampling.BOX)
        pixels = np.asarray(reduced, dtype=np.float64)
        pixels = pixels * self._rng.uniform(0.75, 1.0) + self._rng.normal(0, 6, pixels.shape)
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _steps(wall: _Rectangle) -> Iterator[_Points]:
    """Yield short strokes across a wall."""
    along = np.arange(2.0, max(wall.width, wall.height) - 2, 4.0)
    for at in along.tolist():
        if wall.width > wall.height:
            ends = (wall.left + at, wall.bottom), (wall.left + at + 2, wall.top)
        else:
            ends = (wall.left, wall.top + at + 2), (wall.right, wall.top + at)
        yield np.array(ends)
