"""The report page of a run, a program or a rehearsal: one HTML file that can be mailed.

Charts are drawn by uPlot (https://github.com/leeoniya/uPlot, MIT), inlined like everything else.
"""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

_FOLDER = Path(__file__).parent
# Points of a curve; fewer where a chart has many curves.
_MOST_POINTS, _LEAST_POINTS, _MOST_OF_CHART = 1000, 50, 20_000

Tone = Literal["good", "bad", "open"]
Kind = Literal["boot", "trained", "lost", "done", "bad-end", "planned"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A named line of points; a reference is dashed and drawn over the curves before it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    is_reference: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A period of a machine or an attempt: its start relative to the first, and its kind.

    `planned` is no period, but a mark.
    """

    start: float
    seconds: float
    kind: Kind


def page(*, title: str, verdict: str, tone: Tone, sections: Mapping[str, str]) -> str:
    """Return the complete page; `sections` maps headings ("" for none) to HTML."""
    parts = [
        (f"<h2>{html.escape(heading)}</h2>\n" if heading else "") + content
        for heading, content in sections.items()
    ]
    template = Template((_FOLDER / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(title),
        verdict=html.escape(verdict),
        tone=tone,
        sections="\n".join(parts),
        library=(_FOLDER / "uplot.min.js").read_text(encoding="utf-8"),
        library_style=(_FOLDER / "uplot.min.css").read_text(encoding="utf-8"),
    )


def chart(curves: Sequence[Curve], *, y_label: str, marks: Sequence[float] = ()) -> str:
    """Draw curves over the steps, with a dashed line at each of `marks`; "" without points."""
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return ""
    most = min(_MOST_POINTS, max(_LEAST_POINTS, _MOST_OF_CHART // len(curves)))
    data = {"curves": [_drawn(curve, most) for curve in curves], "marks": list(marks)}
    text = json.dumps(data | {"x_label": "step", "y_label": y_label}, allow_nan=False)
    # No text of a run may close the script element that contains it.
    return f'<div class="chart"><script type="application/json">{_in_script(text)}</script></div>'


def timeline(rows: Iterable[tuple[str, Sequence[Bar], str]]) -> str:
    """Draw one line per machine or attempt: name, bars on a common axis, how it ended."""
    rows = list(rows)
    end = max((bar.start + bar.seconds for _, bars, _ in rows for bar in bars), default=0.0)
    if not end:
        return ""
    lines = []
    for name, bars, ended in rows:
        drawn = "".join(
            f'<i class="{bar.kind}" style="left:{100 * bar.start / end:.2f}%;'
            f'width:{100 * max(bar.seconds, 0) / end:.2f}%" title="{bar.seconds:.1f} s"></i>'
            for bar in bars
        )
        lines.append(
            f'<div class="row"><span>{html.escape(name)}</span><div class="track">{drawn}</div>'
            f'<span class="quiet">{html.escape(ended)}</span></div>'
        )
    axis = f'<div class="row quiet"><span></span><span>0 to {end:.0f} s</span><span></span></div>'
    return "\n".join([*lines, axis])


def table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), *, is_confusion: bool = False
) -> str:
    """Return a table; without a head, its first column labels the second.

    A confusion matrix has counts after the first column, shaded by their share of the row.
    """
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{_confused(row) if is_confusion else _cells(row)}</tr>" for row in rows)
    kind = "data" if head else "facts"
    top = f"<tr>{top}</tr>" if top else ""
    return f'<div class="scroll"><table class="{kind}">{top}{body}</table></div>'


def _cells(row: Iterable[str]) -> str:
    """Return table cells in which narrow columns break long names after an underscore."""
    cells = (html.escape(cell).replace("_", "_<wbr>") for cell in row)
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _confused(row: Sequence[str]) -> str:
    counts = [float(cell) for cell in row[1:]]
    most = max(1.0, sum(counts))
    shaded = (
        f'<td style="background: color-mix(in srgb, var(--c0) {60 * count / most:.0f}%, '
        f'transparent)">{html.escape(cell)}</td>'
        for cell, count in zip(row[1:], counts, strict=True)
    )
    return _cells(row[:1]) + "".join(shaded)


def _in_script(text: str) -> str:
    return text.replace("<", "\\u003c")


def _drawn(curve: Curve, most: int) -> dict[str, Any]:
    """Keep the lowest and highest point of each stretch of a long curve, so no spike is lost."""
    num = len(curve.x)
    kept: Sequence[int] = range(num)
    if num > most:
        size = -(-num // (most // 2))
        spans = [range(first, min(first + size, num)) for first in range(0, num, size)]
        extremes = {at(span, key=curve.y.__getitem__) for span in spans for at in (min, max)}
        kept = sorted({0, num - 1} | extremes)
    ys = [float(y) if math.isfinite(y := curve.y[at]) else None for at in kept]
    about = {"name": curve.name, "is_reference": curve.is_reference}
    return about | {"x": [curve.x[at] for at in kept], "y": ys}
