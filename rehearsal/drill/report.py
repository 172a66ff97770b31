"""A receipt for people: its rows, and one HTML page with the machines' timeline and the losses."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from contract.lineage import Line

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


def receipt_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the receipt's rows as people read them: name and value."""
    return _program_rows(receipt) if "program" in receipt else _workload_rows(receipt)


def show_receipt(rows: Sequence[tuple[str, str]], console: Console) -> None:
    """Print the receipt's rows as a table."""
    table = Table(show_header=False, title="receipt", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def write_report(
    path: Path,
    receipt: Mapping[str, Any],
    curves: Mapping[str, Sequence[Line]],
    rows: Sequence[tuple[str, str]],
) -> None:
    """Write the page; everything is inline, so that the file can be mailed."""
    title = receipt.get("program") or f"{receipt['workload']} / {receipt['recipe']}"
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    page = PAGE.format(
        title=html.escape(title),
        timeline=_timeline(receipt["machines"]),
        curves="".join(_curve(name, steps) for name, steps in curves.items()),
        rows=cells,
    )
    path.write_text(page)


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


def _workload_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    equal = (
        receipt["weights_sha256"] == receipt["uninterrupted_weights_sha256"]
        and receipt["losses_equal"]
    )
    commit = receipt["notice_to_commit_seconds"]
    gained = sum(item.get("gained_steps", 0) for item in receipt["interruption_list"])
    return [
        *_start_rows(receipt),
        ("steps", f"{receipt['steps']} in the lineage, {receipt['steps_computed']} computed"),
        (
            "interruptions",
            f"{receipt['interruptions']}: "
            + "; ".join(item["what"] for item in receipt["interruption_list"]),
        ),
        (
            "notice to commit",
            f"{'never' if commit is None else f'{commit:.2f} s'} of {receipt['notice_seconds']:g} s"
            " (the demo's notice; EC2 gives 120 s)"
            + (f", then {gained} steps more, committed" if gained else ""),
        ),
        ("steps lost", f"{receipt['steps_lost']} (done again, never skipped)"),
        _result(receipt),
        *_cost_rows(receipt),
        *_end_rows(receipt),
        ("weights", receipt["weights_sha256"]),
        ("uninterrupted", receipt["uninterrupted_weights_sha256"]),
        ("equal bit for bit", "yes, weights and losses" if equal else "NO"),
    ]


def _result(receipt: Mapping[str, Any]) -> tuple[str, str]:
    """The accuracy and its baselines; else the last stage's first metric in each stage."""
    if (accuracy := receipt["validation_accuracy"]) is not None:
        baselines = receipt["baseline_accuracies"].items()
        others = "".join(f"; {name.replace('_', ' ')} {value:.3f}" for name, value in baselines)
        return "validation accuracy", f"{accuracy:.3f}{others}"
    stages = receipt["stages"]
    metric = next(iter(list(stages.values())[-1]))
    found = [f"{stage} {m[metric]:.4g}" for stage, m in stages.items() if metric in m]
    return f"validation {metric}", "; ".join(found)


def _program_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    redone = receipt["steps_redone"]
    equal = receipt["final_files"] == receipt["uninterrupted_final_files"]
    return [
        *_start_rows(receipt),
        ("program", f"{receipt['program']}, in {receipt['attempts']} attempts"),
        (
            "interruptions",
            f"{receipt['interruptions']}: "
            + "; ".join(item["what"] for item in receipt["interruption_list"]),
        ),
        (
            "steps",
            f"{receipt['steps']} in the run"
            + ("" if redone is None else f", {redone} of them done again"),
        ),
        ("time lost", f"{receipt['seconds_lost']:.1f} s, since what the last snapshots hold"),
        ("snapshots", f"{receipt['snapshots']} of its checkpoint folder"),
        ("last metrics", _figures(receipt["last_metrics"])),
        ("uninterrupted", _figures(receipt["uninterrupted_last_metrics"])),
        *_cost_rows(receipt),
        *_end_rows(receipt),
        ("model", ", ".join(receipt["final_files"])),
        (
            "equal bit for bit",
            "yes"
            if equal
            else "no: this program goes on otherwise than it would have without interruption; a "
            "workload does not (docs/your-program.md)",
        ),
    ]


def _start_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of what was there before the first step."""
    data = receipt["dataset"]
    return [
        ("stack resources", f"{receipt['resources']} created, each checked by its own API"),
        (
            "dataset synced",
            f"{data['files']} files, {data['megabytes']:.1f} MB, "
            f"{data['megabytes_per_second']:.1f} MB/s",
        ),
    ]


def _cost_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of what it cost."""
    return [
        (
            "cost, modelled",
            f"these {receipt['billed_seconds']:.0f} machine seconds at the prices of "
            f"{receipt['size']}: ${receipt['usd_on_demand']:.4f} on demand (list price), "
            f"${receipt['usd_spot']:.4f} on Spot ({receipt['spot_price_basis']})",
        ),
        ("spent by market", _spending(receipt["spent"])),
    ]


def _end_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of what was left running."""
    return [
        ("fleet", f"target capacity {receipt['fleet_target_capacity']}"),
        (
            "left running",
            f"{receipt['instances_running']} instances, {receipt['processes_left']} processes",
        ),
        ("Guard", f"ran {receipt['guard_invocations']} times on the fleet's events"),
    ]


def _spending(spent: Mapping[str, Any]) -> str:
    """Return dollars by market, as the Guard counted them at its last call, and the fallback."""
    markets = "; ".join(
        f"{market} ${each['usd']:.4f} for {each['hours'] * 3600:.0f} s"
        for market, each in spent["by_market"].items()
    )
    moves = spent["moves"]
    fallback = f"fallback: {moves} moves between markets" if moves else "fallback: none"
    return f"{markets or 'nothing counted'}; {fallback} (the Guard's count, at modelled prices)"


def _figures(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or "none reported"
