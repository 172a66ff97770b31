"""Small SVG charts for a self-contained page: curves and bars, without scripts or libraries."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, LEFT, RIGHT = 900, 80, 12
_HEIGHT, _BOTTOM, _TOP = 240, 24, 24
_ROW = 26
_MOST_POINTS = 1000
_COLOURS = ("#3b74c4", "#c8372d", "#2e8b57", "#8a5fb5", "#c48a1a", "#555")


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A named line of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineBar:
    """A period of time in one row of a timeline."""

    row: str
    start: float
    seconds: float
    colour: str
    title: str


def draw_curves(curves: Sequence[Curve], marks: Sequence[float], x_label: str) -> str:
    """Draw curves in one chart, with a red vertical line at each x of `marks`."""
    curves = [_thinned(curve) for curve in curves if len(curve.x)]
    if not curves:
        return ""
    xs = [x for curve in curves for x in curve.x]
    ys = [y for curve in curves for y in curve.y]
    low, high = min(ys), max(ys)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    first, last = min(xs), max(max(xs), min(xs) + 1e-9)

    def place_x(x: float) -> float:
        return LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        return _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<rect x="{LEFT}" y="{_TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}" fill="none" stroke="#ddd"/>',
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place_y((low + high) / 2):.1f}" '
        f'y2="{place_y((low + high) / 2):.1f}" stroke="#eee"/>',
    ]
    parts += [
        f'<line x1="{place_x(x):.1f}" x2="{place_x(x):.1f}" y1="{_TOP}" '
        f'y2="{_HEIGHT - _BOTTOM}" stroke="#c8372d" stroke-width="0.8"/>'
        for x in marks
        if first <= x <= last
    ]
    for number, curve in enumerate(curves):
        kept = list(zip(curve.x, curve.y, strict=True))
        points = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in kept)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
        )
        if len(kept) == 1:
            x, y = kept[0]
            parts.append(f'<circle cx="{place_x(x)}" cy="{place_y(y)}" r="3" fill="{colour}"/>')
    # Above the chart: inside it the names would cover the curves.
    names = "".join(
        f'<tspan fill="{_COLOURS[number % len(_COLOURS)]}" dx="{12 if number else 0}">'
        f"{html.escape(curve.name)}</tspan>"
        for number, curve in enumerate(curves)
    )
    parts.append(f'<text x="{LEFT}" y="{_TOP - 8}">{names}</text>')
    end = ' text-anchor="end"'
    parts += [
        _text(LEFT - 8, place_y(value) + 4, f"{value:.4g}", end)
        for value in (high, (low + high) / 2, low)
    ]
    parts.append(_text(LEFT, _HEIGHT - 6, f"{x_label} {first:g}"))
    parts.append(_text(WIDTH - RIGHT, _HEIGHT - 6, f"{last:g}", end))
    return _svg(_HEIGHT, parts)


def draw_bars(bars: Sequence[TimelineBar]) -> str:
    """Draw one row per name, in order of appearance, along a common axis of seconds."""
    if not bars:
        return ""
    rows = list(dict.fromkeys(bar.row for bar in bars))
    end = max(max(bar.start + bar.seconds for bar in bars), 1e-9)
    left = LEFT + 90
    scale = (WIDTH - left - RIGHT) / end
    parts = [_text(0, rows.index(row) * _ROW + 17, row) for row in rows]
    parts += [
        f'<rect x="{left + bar.start * scale:.1f}" y="{rows.index(bar.row) * _ROW + 4}" '
        f'width="{max(bar.seconds * scale, 1.5):.1f}" height="18" fill="{bar.colour}">'
        f"<title>{html.escape(bar.title)}</title></rect>"
        for bar in bars
    ]
    height = len(rows) * _ROW + 22
    parts += [_text(left, height - 4, "0 s")]
    parts.append(_text(WIDTH - RIGHT, height - 4, f"{end:.0f} s", ' text-anchor="end"'))
    return _svg(height, parts)


def _thinned(curve: Curve) -> Curve:
    """Of each stretch of a long curve its lowest and highest point: no spike is lost."""
    num = len(curve.x)
    if num <= _MOST_POINTS:
        return curve
    size = -(-num // (_MOST_POINTS // 2))
    spans = [range(first, min(first + size, num)) for first in range(0, num, size)]
    extremes = {at(span, key=curve.y.__getitem__) for span in spans for at in (min, max)}
    kept = sorted({0, num - 1} | extremes)
    return Curve(name=curve.name, x=[curve.x[at] for at in kept], y=[curve.y[at] for at in kept])


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{html.escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
