"""The demo's report: one HTML page with receipt, the machines' timeline and the loss curves."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.lineage import Line
from rehearsal.drill.lineage import Lineage

WIDTH, ROW, LEFT, CHART = 900, 26, 170, 220
PAGE = """<!doctype html>
<meta charset="utf-8"><title>Rehearsal of {title}</title>
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto }}
  table {{ border-collapse: collapse }} td {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd;
  overflow-wrap: anywhere }} td:first-child {{ font-weight: 600; white-space: nowrap }}
  svg text {{ font: 12px system-ui, sans-serif }}
</style>
<h1>Rehearsal of {title}</h1>
<h2>Machines</h2>{timeline}
<p>Grey: user data and start of the trainer, until its first metrics line. Blue: preparation and
training, also in what is left of a notice after the commit. Red: SIGKILL to everything.</p>
<h2>Loss</h2>{curves}
<p>A workload's steps once each, as the run's receipt counts them, a program's as it reported them;
a red line is an interruption.</p>
<h2>Receipt</h2><table>{rows}</table>
"""


def write_report(
    path: Path, receipt: Mapping[str, Any], lineage: Lineage, rows: Sequence[tuple[str, str]]
) -> None:
    """Write the page; everything is inline, so that the file can be mailed."""
    title = f"{receipt['workload']} / {receipt['recipe']}"
    curves = [_curve(stage, steps) for stage, steps in _by_stage(lineage).items()]
    path.write_text(_page(title, receipt, curves, rows))


def _page(
    title: str,
    receipt: Mapping[str, Any],
    curves: Sequence[str],
    rows: Sequence[tuple[str, str]],
) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return PAGE.format(
        title=html.escape(title),
        timeline=_timeline(receipt["machines"]),
        curves="".join(curves),
        rows=cells,
    )


def write_program_report(
    path: Path, receipt: Mapping[str, Any], rows: Sequence[tuple[str, str]]
) -> None:
    """Write the page of a program's rehearsal: what it reported, beside the uninterrupted run."""
    curves = [
        _curve(name, steps)
        for name, steps in (
            ("interrupted", receipt["losses"]),
            ("uninterrupted", receipt["uninterrupted_losses"]),
        )
        if steps
    ]
    path.write_text(_page(receipt["program"], receipt, curves, rows))


def _timeline(machines: Sequence[Mapping[str, Any]]) -> str:
    end = max(machine["at"] + machine["seconds"] for machine in machines)
    scale = (WIDTH - LEFT - 10) / end
    parts = []
    for index, machine in enumerate(machines):
        x, y = LEFT + machine["at"] * scale, index * ROW + 4
        length = machine["seconds"] * scale
        ready = machine["seconds_to_first_progress"]
        boot = length if ready is None else min(ready * scale, length)
        parts += [
            f"<g><title>{html.escape(str(machine['ended']))}</title>",
            f'<text x="0" y="{y + 13}">{html.escape(machine["instance"])}</text>',
            _bar(x, y, boot, "#b8c0cc"),
            _bar(x + boot, y, length - boot, "#3b74c4"),
            _bar(x + length - 3, y, 3, "#c8372d"),
            "</g>",
        ]
    height = len(machines) * ROW + 24
    axis = f'<text x="{LEFT}" y="{height - 6}">0 s</text>'
    axis += f'<text x="{WIDTH - 60}" y="{height - 6}">{end:.0f} s</text>'
    return _svg(height, "".join(parts) + axis)


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="18" fill="{colour}"/>'


def _by_stage(lineage: Lineage) -> dict[str, list[Line]]:
    stages: dict[str, list[Line]] = {}
    for step in sorted(lineage.steps):
        record = lineage.steps[step]
        stages.setdefault(record["stage"], []).append(record)
    return stages


def _curve(stage: str, steps: Sequence[Mapping[str, Any]]) -> str:
    highest = max(step["loss"] for step in steps) or 1.0
    across = (WIDTH - LEFT - 10) / max(len(steps) - 1, 1)
    up = (CHART - 30) / highest
    points = " ".join(
        f"{LEFT + index * across:.1f},{CHART - 20 - step['loss'] * up:.1f}"
        for index, step in enumerate(steps)
    )
    marks = "".join(
        f'<line x1="{LEFT + index * across:.1f}" x2="{LEFT + index * across:.1f}" y1="0" '
        f'y2="{CHART - 20}" stroke="#c8372d"/>'
        for index, step in enumerate(steps)
        if index and step["generation"] != steps[index - 1]["generation"]
    )
    labels = (
        f'<text x="0" y="14">{html.escape(stage)}</text><text x="0" y="30">{highest:.2f}</text>'
        f'<text x="{LEFT}" y="{CHART - 4}">1</text>'
        f'<text x="{WIDTH - 90}" y="{CHART - 4}">{len(steps)} steps</text>'
    )
    line = f'<polyline points="{points}" fill="none" stroke="#3b74c4" stroke-width="1.5"/>'
    return _svg(CHART, marks + line + labels)


def _svg(height: float, content: str) -> str:
    return f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">{content}</svg>'
