"""The sections that only a program's run has on its page: metrics, snapshots, the log's end."""

import gzip
import html
import json
import math
import zlib
from collections.abc import Sequence

from contract.keys import EVENTS, LOGS
from contract.lineage import Line
from training.record.history import History
from training.report.charts import Curve, draw_curves
from training.store.protocol import Store, get_each

_MOST_CURVES = 12
_MOST_SNAPSHOTS = 20
_TAIL_LINES = 60


def program_sections(store: Store, history: History) -> str:
    """HTML of the sections, each with its heading."""
    return (
        f"<h2>Metrics</h2>{_metrics(history)}"
        f"<h2>Snapshots</h2>{_snapshots(store)}"
        f"<h2>End of the log</h2>{_log_tail(store)}"
    )


def _metrics(history: History) -> str:
    """Each metric over the program's steps, a step that was done again as the last time."""
    points: dict[str, dict[int, tuple[int, float]]] = {}
    resumed = [line["step"] for line in history.lines if line["kind"] == "resume" and line["step"]]
    for line in history.lines:
        if line["kind"] == "metrics" and isinstance(line.get("values"), dict):
            _add(points, line)
    curves = [
        draw_curves([_curve(name, by_step)], resumed, "step") for name, by_step in points.items()
    ]
    more = len(curves) - _MOST_CURVES
    rest = f"<p>And {more} more.</p>" if more > 0 else ""
    return "".join(curves[:_MOST_CURVES]) + rest or (
        "<p>None: the program printed none that its metric definitions know, and wrote no "
        "TensorBoard files.</p>"
    )


def _add(points: dict[str, dict[int, tuple[int, float]]], line: Line) -> None:
    generation = int(line["generation"])
    for name, value in line["values"].items():
        if isinstance(value, int | float) and math.isfinite(value):
            known = points.setdefault(name, {})
            # What has no step of its own is shown in its order.
            at = line.get("at")
            step = len(known) if at is None else int(at)
            if known.get(step, (0, 0.0))[0] <= generation:
                known[step] = generation, value


def _curve(name: str, by_step: dict[int, tuple[int, float]]) -> Curve:
    steps = sorted(by_step)
    return Curve(name=name, x=steps, y=[by_step[step][1] for step in steps])


def _snapshots(store: Store) -> str:
    keys = [key for key in store.sizes(EVENTS) if key.endswith("-committed.json")]
    events = []
    for found in get_each(store, keys[-_MOST_SNAPSHOTS:]):
        try:
            events.append(json.loads(found.data) if found else {})
        except ValueError:
            continue
    rows = [
        [
            str(event.get("step", "")),
            str(event["time"]),
            str(event.get("kind", "")),
            str(event.get("num_files", "")),
            f"{event.get('changed_bytes', 0) / 1e6:.1f}",
            f"{event.get('sent_bytes', 0) / 1e6:.1f}",
            f"{event.get('seconds', 0):.2f}",
        ]
        for event in events
        if "time" in event
    ]
    if not rows:
        return "<p>None: a loss of the machine costs everything since the start.</p>"
    head = ["snapshot", "time", "kind", "files", "MB changed", "MB sent", "seconds"]
    earlier = len(keys) - _MOST_SNAPSHOTS
    more = f"<p>And {earlier} before these.</p>" if earlier > 0 else ""
    return _table(rows, head) + more


def _log_tail(store: Store) -> str:
    """The last lines of the last attempt, from its last parts."""
    keys = sorted(store.sizes(LOGS))
    lines: list[str] = []
    for key in reversed(keys[-2:]):
        found = store.get(key)
        try:
            text = gzip.decompress(found.data).decode(errors="replace") if found else ""
        except (OSError, EOFError, zlib.error):
            continue
        lines = [*text.splitlines(), *lines]
        if len(lines) >= _TAIL_LINES:
            break
    if not lines:
        return "<p>None.</p>"
    names = ", ".join(html.escape(key) for key in keys[-2:])
    shown = html.escape("\n".join(lines[-_TAIL_LINES:]))
    return f"<pre>{shown}</pre><p>From {names}; all of them are whole.</p>"


def _table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"
