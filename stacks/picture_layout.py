"""Places boxes in columns so that arrows run to the right: a small layered graph layout.

Columns by longest path, long arrows through gaps of the columns between, order within a column by
the mean of the neighbours (Sugiyama, Tagawa, Toda 1981). Knows nothing of stacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_COLUMN_GAP, _ROW_GAP, _MARGIN, _TOP = 92, 22, 36, 56
# A long arrow's place in a column that it passes.
_LANE = 14
_SWEEPS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """`user` uses `used`; edges found by name close circles and do not count for the columns."""

    user: str
    used: str
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A box's place."""

    name: str
    x: int
    y: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """All boxes, and the points that each edge runs through."""

    boxes: Sequence[Placed]
    routes: Mapping[tuple[str, str], Sequence[tuple[float, float]]]
    width: int
    height: int


def place(
    heights: Mapping[str, int], edges: Sequence[Edge], width: int, last: Collection[str]
) -> Drawing:
    """Place boxes of the given heights; those in `last` share the last column."""
    column = _columns(heights, [edge for edge in edges if edge.kind != "by name"], last)
    lanes, columns = _lanes(heights, edges, column)
    sizes = {**heights, **{lane: _LANE for chain in lanes.values() for lane in chain}}
    neighbours = _neighbours(edges, lanes)
    _order(columns, neighbours)
    tallest = max(_height(names, sizes) for names in columns)
    y: dict[str, float] = {}
    for names in columns:
        at = _TOP + (tallest - _height(names, sizes)) / 2
        for name in names:
            y[name] = at
            at += sizes[name] + _ROW_GAP
    x = {
        name: _MARGIN + index * (width + _COLUMN_GAP)
        for index, names in enumerate(columns)
        for name in names
    }
    boxes = [Placed(name=name, x=x[name], y=round(y[name]), height=heights[name])
             for name in heights]  # fmt: skip
    routes = _routes(edges, lanes, x, y, sizes, width)
    return Drawing(
        boxes=boxes,
        routes=routes,
        width=2 * _MARGIN + len(columns) * (width + _COLUMN_GAP) - _COLUMN_GAP,
        height=round(_TOP + tallest + 40),
    )


def _columns(
    names: Mapping[str, int], edges: Sequence[Edge], last: Collection[str]
) -> dict[str, int]:
    """The column of each box: to the left of all that it uses."""
    depth = {name: 0 if name in last else 1 for name in names}
    for _ in names:
        for edge in edges:
            if edge.user not in last:
                depth[edge.user] = max(depth[edge.user], depth[edge.used] + 1)
    deepest = max(depth.values(), default=0)
    return {name: deepest - value for name, value in depth.items()}


def _lanes(
    names: Mapping[str, int], edges: Sequence[Edge], column: Mapping[str, int]
) -> tuple[dict[tuple[str, str], list[str]], list[list[str]]]:
    """For each edge the lanes in the columns that it passes; and all columns with their lanes."""
    columns: list[list[str]] = [[] for _ in range(max(column.values(), default=0) + 1)]
    for name in names:
        columns[column[name]].append(name)
    lanes = {}
    for edge in edges:
        start, end = column[edge.user], column[edge.used]
        step = 1 if end > start else -1
        chain = []
        for index in range(start + step, end, step):
            lane = f"{edge.user}>{edge.used}@{index}"
            columns[index].append(lane)
            chain.append(lane)
        lanes[edge.user, edge.used] = chain
    return lanes, columns


def _neighbours(
    edges: Sequence[Edge], lanes: Mapping[tuple[str, str], Sequence[str]]
) -> dict[str, list[str]]:
    near: dict[str, list[str]] = {}
    for edge in edges:
        chain = [edge.user, *lanes[edge.user, edge.used], edge.used]
        for one, other in pairwise(chain):
            near.setdefault(one, []).append(other)
            near.setdefault(other, []).append(one)
    return near


def _order(columns: list[list[str]], near: Mapping[str, Sequence[str]]) -> None:
    """Order each column by where its neighbours stand, sweeping to and fro."""
    for sweep in range(_SWEEPS):
        indices = range(len(columns)) if sweep % 2 == 0 else reversed(range(len(columns)))
        for index in indices:
            rank = {
                name: (place + 0.5) / len(names)
                for names in columns
                for place, name in enumerate(names)
            }
            columns[index].sort(
                key=lambda name: (
                    sum(rank[other] for other in near.get(name, [name]))
                    / len(near.get(name, [name])),
                    name,
                )
            )


def _routes(
    edges: Sequence[Edge],
    lanes: Mapping[tuple[str, str], Sequence[str]],
    x: Mapping[str, int],
    y: Mapping[str, float],
    sizes: Mapping[str, int],
    width: int,
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Leave and enter each box at points of its own side, in the order of what lies beyond."""

    def middle(name: str) -> float:
        return y[name] + sizes[name] / 2

    ports: dict[tuple[str, bool], list[tuple[float, tuple[str, str]]]] = {}
    for edge in edges:
        chain = [edge.user, *lanes[edge.user, edge.used], edge.used]
        is_right = x[edge.used] > x[edge.user]
        key = (edge.user, edge.used)
        ports.setdefault((edge.user, is_right), []).append((middle(chain[1]), key))
        ports.setdefault((edge.used, not is_right), []).append((middle(chain[-2]), key))
    at: dict[tuple[str, tuple[str, str]], float] = {}
    for (name, _), wanted in ports.items():
        for index, (_, key) in enumerate(sorted(wanted), start=1):
            at[name, key] = y[name] + sizes[name] * index / (len(wanted) + 1)
    routes = {}
    for edge in edges:
        key = (edge.user, edge.used)
        is_right = x[edge.used] > x[edge.user]
        points = [(x[edge.user] + (width if is_right else 0), at[edge.user, key])]
        for lane in lanes[key]:
            near, far = (x[lane], x[lane] + width) if is_right else (x[lane] + width, x[lane])
            points += [(near, middle(lane)), (far, middle(lane))]
        points.append((x[edge.used] + (0 if is_right else width), at[edge.used, key]))
        routes[key] = [(float(a), b) for a, b in points]
    return routes


def _height(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for name in names) + _ROW_GAP * max(0, len(names) - 1)
