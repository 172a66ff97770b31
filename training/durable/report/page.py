"""report.html: a run, or a sweep's runs, on one self-contained page: curves, results, lost work.

Written at the end of every run, and by `python -m training report` at any time. Imports no torch.
"""

import base64
import csv
import gzip
import html
import itertools
import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from contract.goodput import USEFUL, Goodput
from contract.keys import EVALUATION, LOGS, RECEIPT, REPORT, SWEEP
from contract.lineage import Line
from contract.program import WORKLOAD as PROGRAM
from contract.report import Bar, Curve, Kind, Tone, chart, page, table, timeline
from contract.sweep import Sweep, SweepRun
from training.durable.record.goodput import goodput_of, read_guard
from training.durable.record.head import Head
from training.durable.record.history import AttemptSummary, History
from training.durable.record.run import RunConfig
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store, Stored, put_unless_changed

_log = logging.getLogger(__name__)

_PICTURES = {
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".jpg": "image/jpeg",
    ".webp": "image/webp",
}
_TEXTS = (".txt", ".md", ".csv")
# Limits for each kind of file; more, and larger ones, become links.
_MOST_BYTES = 400_000
_MOST_SHOWN = 12
_MOST_CURVES = 4
_MOST_METRICS = 12
_MOST_SNAPSHOTS = 20
_MOST_PASSED_OVER = 5
_TAIL_LINES = 60
_KINDS: dict[str, Kind] = {
    "finished": "done",
    "failed": "bad-end",
    "released": "trained",
    "silent": "lost",
    "diverged": "bad-end",
}
_SHARES = ("accuracy", "top1")
_TONES: dict[str, Tone] = {"finished": "good", "failed": "bad"}


def write_report(
    store: Store,
    record: RunConfig,
    head: Head,
    usd_per_hour: float | None = None,
    *,
    first: Callable[[History, Goodput], None] = lambda history, bought: None,
) -> tuple[History, Goodput, str]:
    """Write the page into the run, but not over a newer one; return its figures and a summary.

    `first` is called with history and goodput beforehand, for a receipt that the page shows.
    """
    before = store.get(REPORT)
    history = History.read(store)
    bought = goodput_of(history, record, read_guard(store), usd_per_hour)
    first(history, bought)
    verdict, lost = _verdict(history, record, head), _lost(history, record, head)
    ended = f" It failed: {head.reason}" if head.reason else ""
    written = page(
        title=f"{record.run_id}: {record.workload} / {record.recipe}",
        verdict=verdict,
        tone=_TONES.get(head.state, "open"),
        sections={
            "": table(
                {
                    "what was trained": _trained(record),
                    "is it good": _good(history),
                    "did it finish": f"{verdict}{ended}",
                    "what did it cost": bought.sentence(),
                    "what was lost": lost,
                }.items()
            ),
            "What the money bought": _bought(bought),
            "Results": _results(store, record, history),
            **_starts(history),
            **_sections(store, record, history),
            **_ranks(history),
            "Attempts": _attempts(history),
            "The run": table(_about(store, record, head)),
        },
    )
    data = written.encode(errors="replace")  # of a message that was cut within a letter
    if not put_unless_changed(store, REPORT, data, before.etag if before else None):
        _log.info(f"[report] another attempt has just written {store.uri}/{REPORT}")
    return history, bought, f"{verdict} {lost} {bought.sentence()}.{ended}"


def _trained(record: RunConfig) -> str:
    if record.workload == PROGRAM:
        return str(record.config.get("command", PROGRAM))
    changed = "".join(f", {name}={value}" for name, value in record.overrides.items())
    return f"{record.workload} by the recipe {record.recipe}{changed}"


def _good(history: History) -> str:
    """Say the last stage's share that is right, or its first metric, the others', and chance."""
    stages = {stage: lines[-1]["metrics"] for stage, lines in history.evaluations().items()}
    if not stages:
        last = _last_values(history)
        return ", ".join(f"{n} {value}" for n, value in last.items()) or "not evaluated"
    *_, stage = stages
    name = next((n for n in _SHARES if n in stages[stage]), next(iter(stages[stage]), ""))
    of_all = {each: metrics[name] for each, metrics in stages.items() if name in metrics}
    chance = [x["facts"]["chance"] for x in history.lines if "chance" in (x.get("facts") or ())]
    of_all |= {"chance": chance[-1]} if chance and name in _SHARES else {}
    said = [f"{name} of {stage} {_readable(of_all.pop(stage, ''))}"]
    return "; ".join(said + [f"{each} {_readable(value)}" for each, value in of_all.items()])


def _verdict(history: History, record: RunConfig, head: Head) -> str:
    """Say how the run ended, after how much."""
    attempts = history.attempts
    num_steps, what = len(history.steps), f"{len(history.steps)} steps"
    if record.workload == PROGRAM:
        # Some report every tenth step only, others none.
        num_steps = max(history.steps["step"], default=0)
        num_snapshots = max((entry.step for entry in head.checkpoints), default=0)
        what = f"{num_steps} steps and " if num_steps else ""
        what += f"{num_snapshots} snapshot{'s' * (num_snapshots != 1)}"
    return f"{head.state}: {what} in {len(attempts)} attempt{'s' * (len(attempts) != 1)}."


def _lost(history: History, record: RunConfig, head: Head) -> str:
    """Say what was computed twice, skipped or passed over."""
    text = ""
    if len(history.steps) or record.workload != PROGRAM:
        text = f"{sum(a.num_repeated for a in history.attempts)} steps were computed twice."
    if skipped := ", ".join(map(str, head.skipped_steps)):
        text += f" These steps diverged and were skipped: {skipped}."
    if history.passed_over:
        named = "; ".join(history.passed_over[:_MOST_PASSED_OVER])
        text += f" Passed over ({len(history.passed_over)}): {named}."
    return text or "unknown: the program names no steps"


def _sections(store: Store, record: RunConfig, history: History) -> dict[str, str]:
    """Return the sections of a program's run, or of a workload's, by heading."""
    if record.workload == PROGRAM:
        return {
            "Certificate": table([*record.config.get("certificate", {}).items()]),
            "Metrics": _metrics(history),
            "Snapshots": _snapshots(history),
            "End of the log": _log_tail(store),
        }
    return {
        "Loss": _loss(history),
        "Evaluations": _evaluations(history),
        "Files of the last evaluations": _files(store, history),
    }


def _loss(history: History) -> str:
    parts = []
    for stage, steps in history.steps.by_stage().items():
        pairs = itertools.pairwise(zip(steps["generation"], steps["step"], strict=True))
        resumed = [step for (before, _), (after, step) in pairs if before != after]
        for key, label in (("loss", "loss"), ("gradient_norm", "norm of the gradients")):
            shown = steps.take(row for row, value in enumerate(steps[key]) if math.isfinite(value))
            curve = Curve(name=stage, x=shown["step"], y=shown[key])
            parts.append(chart([curve], y_label=label, marks=resumed))
    legend = "Each step once; a dotted line marks where another attempt resumed."
    return "".join(parts) + f'<p class="quiet">{legend}</p>'


def _results(store: Store, record: RunConfig, history: History) -> str:
    """Show each stage's last evaluation side by side: results next to their baselines."""
    if record.workload == PROGRAM:
        return _left_by_program(store, history)
    last = {stage: lines[-1]["metrics"] for stage, lines in history.evaluations().items()}
    if not last:
        return "<p>None yet.</p>"
    names = dict.fromkeys(name for metrics in last.values() for name in metrics)
    rows = [
        [name, *(_readable(metrics.get(name, "")) for metrics in last.values())] for name in names
    ]
    return table(rows, ["", *last])


def _starts(history: History) -> dict[str, str]:
    """Show what each stage's start has found, such as how exactly a model has grown."""
    lines = [line for line in history.lines if line["kind"] == "start" and line["facts"]]
    facts = {line["stage"]: line["facts"] for line in lines}  # once: a resumed stage has none
    rows = [[s, n, _readable(value)] for s, found in facts.items() for n, value in found.items()]
    return {"At the stages' starts": table(rows)} if rows else {}


def _ranks(history: History) -> dict[str, str]:
    """Show what a step took each rank by itself before each stage's last evaluation."""
    lines = [line for line in history.lines if line["kind"] == "ranks" and "names" in line]
    last = {line["stage"]: zip(line["names"], line["own_seconds"], strict=True) for line in lines}
    rows = [[stage, name, _readable(s)] for stage, each in last.items() for name, s in each]
    return {"Seconds of a step's own work and data": table(rows)} if rows else {}


def _evaluations(history: History) -> str:
    # A workload lists its most important metrics first. Stages with the same metrics share a chart:
    # a model with its baselines.
    groups: dict[tuple[str, ...], dict[str, Sequence[Line]]] = {}
    for stage, lines in history.evaluations().items():
        names = [n for n in lines[0]["metrics"] if all(n in line["metrics"] for line in lines)]
        groups.setdefault(tuple(names[:_MOST_CURVES]), {})[stage] = lines
    parts = []
    for shared, stages in groups.items():
        for name in shared:
            curves = [metric_curve(stage, name, lines) for stage, lines in stages.items()]
            parts.append(chart(curves, y_label=name))
    return "".join(parts) or "<p>None yet.</p>"


def metric_curve(label: str, name: str, evaluations: Sequence[Line]) -> Curve:
    """Return the curve of one metric, where the evaluations have it."""
    pairs = [(line["step"], line["metrics"].get(name)) for line in evaluations]
    shown = [(step, value) for step, value in pairs if value is not None]
    return Curve(name=label, x=[step for step, _ in shown], y=[value for _, value in shown])


def _metrics(history: History) -> str:
    """Plot each metric over the program's steps; a repeated step counts as last done."""
    points: dict[str, dict[int, float]] = {}
    resumed = [line["step"] for line in history.lines if line["kind"] == "resume" and line["step"]]
    for line in (line for line in history.lines if line["kind"] == "metrics"):
        for name, value in line["values"].items():
            if isinstance(value, int | float) and math.isfinite(value):
                known = points.setdefault(name, {})
                # A value without a step of its own is shown in the order of arrival.
                known[len(known) if line.get("at") is None else int(line["at"])] = value
    curves = []
    for name, known in points.items():
        steps = sorted(known)
        curves.append(Curve(name=name, x=steps, y=[known[step] for step in steps]))
    more = len(curves) - _MOST_METRICS
    rest = f"<p>And {more} more.</p>" if more > 0 else ""
    drawings = (
        chart([curve], y_label=curve.name, marks=resumed) for curve in curves[:_MOST_METRICS]
    )
    return "".join(drawings) + rest or (
        "<p>None: the program printed none that match its metric definitions, and wrote no "
        "TensorBoard files.</p>"
    )


def _left_by_program(store: Store, history: History) -> str:
    """Show the last value of each metric, and what the program left."""
    found = _last_values(history)
    receipt = parse_receipt(store.get(RECEIPT))
    for kind in ("final", "checkpoint"):
        if files := receipt.get(f"{kind}_files"):
            found[f"{kind} files"] = ", ".join(files)
    if "exit_code" in receipt:
        found["exit code"] = _readable(receipt["exit_code"])
    return table([*found.items()]) if found else "<p>None yet.</p>"


def _last_values(history: History) -> dict[str, str]:
    reported = [line["values"] for line in history.lines if line["kind"] == "metrics"]
    return {name: _readable(value) for values in reported for name, value in values.items()}


def _snapshots(history: History) -> str:
    events = [event for event in history.events if event["name"] == "committed"]
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
        for event in events[-_MOST_SNAPSHOTS:]
    ]
    if not rows:
        return "<p>None: losing the machine would cost everything since the start.</p>"
    head = ["snapshot", "time", "kind", "files", "MB changed", "MB sent", "seconds"]
    earlier = len(events) - _MOST_SNAPSHOTS
    more = f"<p>And {earlier} before these.</p>" if earlier > 0 else ""
    return table(rows, head) + more


def _log_tail(store: Store) -> str:
    """Show the last lines of the last attempt, from its last parts."""
    keys = sorted(store.sizes(LOGS))
    lines: list[str] = []
    for found in map(store.get, keys[-2:]):
        with suppress(OSError, EOFError, zlib.error):
            text = gzip.decompress(found.data).decode(errors="replace") if found else ""
            lines += text.splitlines()
    if not lines:
        return "<p>None.</p>"
    names = ", ".join(html.escape(key) for key in keys[-2:])
    shown = html.escape("\n".join(lines[-_TAIL_LINES:]))
    return f"<pre>{shown}</pre><p>From {names}, which hold all of it.</p>"


def _bought(bought: Goodput) -> str:
    """Show where the paid time went, next to the plan, and why each machine ended."""
    text = "A line marks what was planned." * bool(bought.planned)
    lines = []
    for cause, name, figures, seconds, planned in bought.rows():
        bar = Bar(start=0.0, seconds=seconds, kind="done" if cause == USEFUL else "lost")
        mark = Bar(start=planned, seconds=0.0, kind="planned")
        lines.append((name, [bar, mark] if bought.planned else [bar], figures))
    ends = table((end.machine, str(end)) for end in bought.ends)
    return f"<p>{html.escape(text)}</p>{timeline(lines)}{ends}"


def _attempts(history: History) -> str:
    attempts = history.attempts
    if not attempts:
        return "<p>None yet.</p>"
    zero = attempts[0].began
    lines = []
    for a in attempts:
        start = (a.began - zero).total_seconds()
        bar = Bar(start=start, seconds=a.seconds, kind=_KINDS[a.ended])
        steps = f", steps {a.first_step} to {a.last_step}" if a.last_step else ""
        lines.append((f"{a.generation} {a.writer}", [bar], f"{a.ended}{steps}"))
    head = ["attempt", "machine", "start", "seconds", "steps", "end", "notice to commit", "lost"]
    rows = [_attempt_row(attempt) for attempt in attempts]
    return timeline(lines) + table(rows, head)


def _attempt_row(a: AttemptSummary) -> list[str]:
    lost = f"{a.num_repeated} steps, {a.repeated_seconds:.1f} s" if a.num_repeated else "nothing"
    steps = "none" if a.first_step is None else f"{a.first_step} to {a.last_step}"
    commit = "" if a.seconds_to_commit is None else f"{a.seconds_to_commit:.2f} s"
    if a.gained_steps:
        commit += f", then {a.gained_steps} more steps"
    ended = f"{a.ended} ({a.cause})" if a.cause else a.ended
    began = a.began.isoformat(timespec="seconds")
    machine = f"{a.writer}, {a.ranks} ranks" if (a.ranks or 1) > 1 else a.writer
    return [str(a.generation), machine, began, f"{a.seconds:.1f}", steps, ended, commit, lost]


def _about(store: Store, record: RunConfig, head: Head) -> Iterator[tuple[str, str]]:
    yield "URI", store.uri
    yield "state", head.state
    receipt = parse_receipt(store.get(RECEIPT))
    others = ("config", "stages", "facts", "times", "format", "state", "goodput")
    shown = {n: value for n, value in receipt.items() if n not in others and value is not None}
    yield from zip(shown, map(_readable, shown.values()), strict=True)
    if not receipt:
        yield "overrides", json.dumps(dict(record.overrides))
        yield "dataset", record.dataset
    yield "config", json.dumps(dict(record.config))


def _files(store: Store, history: History) -> str:
    """Embed pictures, texts and tables in the page, and link other files."""
    sizes = store.sizes(EVALUATION)
    last = {f"{s}-{steps['stage_step'][-1]}" for s, steps in history.steps.by_stage().items()}
    keys = [key for key in sizes if key.removeprefix(EVALUATION).partition("/")[0] in last]
    parts, num_shown = [], Counter[bool]()
    for key in keys:
        suffix = PurePosixPath(key).suffix.lower()
        name, is_picture = html.escape(key.removeprefix(EVALUATION)), suffix in _PICTURES
        found = None
        if (is_picture or suffix in _TEXTS) and sizes[key] <= _MOST_BYTES:
            found = store.get(key) if num_shown[is_picture] < _MOST_SHOWN else None
        if found is not None:
            num_shown[is_picture] += 1
            parts.append(f"<p>{name}</p>{_shown(name, suffix, found.data)}")
        else:
            parts.append(f'<p><a href="{html.escape(key)}">{name}</a> ({sizes[key]} bytes)</p>')
    return "".join(parts) or "<p>None.</p>"


def _shown(name: str, suffix: str, data: bytes) -> str:
    if kind := _PICTURES.get(suffix):
        return f'<img alt="{name}" src="data:{kind};base64,{base64.b64encode(data).decode()}">'
    text = data.decode(errors="replace")
    if suffix != ".csv":
        return f"<pre>{html.escape(text)}</pre>"
    head, *rows = list(csv.reader(text.splitlines())) or [[]]
    return table(rows, head, is_confusion=name.endswith("/confusion.csv"))


def _readable(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_receipt(found: Stored | None) -> dict[str, Any]:
    """Return the receipt; {} if it is missing or damaged: nothing depends on it."""
    if found is None:
        return {}
    with suppress(ValueError):
        if isinstance(receipt := json.loads(found.data), dict):
            return receipt
    _log.warning(f"{RECEIPT} is damaged ({len(found.data)} bytes) and is passed over")
    return {}


@dataclass(frozen=True, kw_only=True)
class _SweptRun:
    """One run of a sweep, as its store has it now."""

    run: SweepRun
    store: Store
    head: Head | None

    @cached_property
    def history(self) -> History:
        return History.read(self.store)

    @cached_property
    def evaluations(self) -> Sequence[Mapping[str, Any]]:
        """The evaluations of its last stage so far, oldest first."""
        return next(reversed(self.history.evaluations().values()), [])

    @cached_property
    def result(self) -> tuple[str, float | None]:
        """A metric and its value: the best of `best_metric`, else the last of the first metric."""
        if self.head is None or not self.evaluations:
            return "", None
        record = RunConfig.read(self.store)
        config = dict(record.config) if record else {}
        settings = {**config.get("settings", {}), **config}
        last: Mapping[str, float] = self.evaluations[-1]["metrics"]
        name = settings.get("best_metric")
        if name not in last:
            return next(iter(last.items()), ("", None))
        found = [each["metrics"].get(name) for each in self.evaluations]
        best = min if settings.get("best_mode") == "min" else max
        return str(name), best([value for value in found if value is not None], default=None)

    def row(self) -> dict[str, Any]:
        """Return its row of a table."""
        name, value = self.result
        state = self.head.state.replace("released", "interrupted") if self.head else "not started"
        steps = max(self.history.steps["step"], default=0) if self.head else 0
        return {"run": self.run.name, "state": state, "step": steps, "metric": name, "value": value}


@dataclass(frozen=True, kw_only=True)
class SweptRuns:
    """A sweep and its runs, at the URI that has its sweep.json."""

    sweep: Sweep
    store: Store
    usd: Mapping[str, float | None] = field(default_factory=dict)  # run -> what it has cost

    @classmethod
    def at(cls, uri: str) -> "SweptRuns | None":
        """Return the sweep whose runs are below `uri`; None if there is none."""
        store = open_store(uri)
        found = store.get(SWEEP)
        if found is None:
            return None
        return cls(sweep=Sweep.from_bytes(found.data, f"{store.uri}/{SWEEP}"), store=store)

    @cached_property
    def runs(self) -> Sequence[_SweptRun]:
        """The runs in the order in which they were drawn."""
        found = []
        for run in self.sweep.runs:
            store = open_store(f"{self.store.uri}/{run.name}", near=self.store)
            found.append(_SweptRun(run=run, store=store, head=Head.read(store)))
        return found

    def write_report(self) -> str:
        """Write the page next to the runs; return the sentence at its top."""
        heads = [each.head for each in self.runs]
        num_done = sum(head is not None and head.state == "finished" for head in heads)
        spent = sum(usd or 0.0 for usd in self.usd.values())
        verdict = f"{num_done} of {len(heads)} runs have finished"
        least = "at least " * (None in self.usd.values())
        verdict += f", for {least}${spent:.2f} so far." if self.usd else "."
        written = page(
            title=f"{self.store.uri.rpartition('/')[2]}: a sweep of {self.sweep.workload} / "
            f"{self.sweep.recipe}, {self.sweep.drawn}",
            verdict=verdict,
            tone="good" if num_done == len(heads) else "open",
            sections={"Runs": self._table(), "Curves": "".join(self._charts())},
        )
        self.store.put(REPORT, written.encode())
        return verdict

    def _table(self) -> str:
        """Show what differs between the runs, next to their results."""
        settings = [dict(o.partition("=")[::2] for o in each.run.overrides) for each in self.runs]
        names = dict.fromkeys(name for each in settings for name in each)
        varied = [name for name in names if len({each.get(name) for each in settings}) > 1]
        head = [*(varied or names), "state", "steps", "metric", "result"]
        rows = []
        for one, values in zip(self.runs, settings, strict=True):
            row, usd = one.row(), self.usd.get(one.run.name)
            value = "" if row["value"] is None else f"{row['value']:.4g}"
            result = [row["state"], str(row["step"]), row["metric"], value]
            cost = ["" if usd is None else f"{usd:.2f}"] if self.usd else []
            rows.append([*(str(values.get(n, "")) for n in varied or names), *result, *cost])
        return table(rows, [*head, *(["dollars"] if self.usd else [])])

    def _charts(self) -> Iterator[str]:
        began = [each for each in self.runs if each.head is not None]
        losses = []
        for each in began:
            for last in list(each.history.steps.by_stage().values())[-1:]:
                losses.append(Curve(name=each.run.name, x=last["step"], y=last["loss"]))
        yield chart(losses, y_label="loss")
        metrics = dict.fromkeys(n for each in began for e in each.evaluations for n in e["metrics"])
        for metric in list(metrics)[:_MOST_CURVES]:
            curves = [metric_curve(each.run.name, metric, each.evaluations) for each in began]
            yield chart(curves, y_label=metric)
