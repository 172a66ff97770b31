"""A sweep's report.html, laid out like a run's: its runs' curves, hyperparameters, cost.

Written by `python -m training report` and `runs open` with the sweep's URI. Imports no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from contract.keys import REPORT, SWEEP
from contract.report import Curve, chart, page, table
from contract.sweep import Sweep, SweepRun
from training.durable.record.head import Head
from training.durable.record.history import History
from training.durable.record.run import RunConfig
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store

_MOST_CURVES = 4


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
            store = open_store(f"{self.store.uri}/{run.name}")
            found.append(_SweptRun(run=run, store=store, head=Head.read(store)))
        return found

    def write_report(self) -> str:
        """Write the page next to the runs; return the sentence at its top."""
        heads = [each.head for each in self.runs]
        num_done = sum(head is not None and head.state == "finished" for head in heads)
        spent = sum(usd or 0.0 for usd in self.usd.values())
        verdict = f"{num_done} of {len(heads)} runs have finished"
        verdict += f", for ${spent:.2f} so far." if self.usd else "."
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
            told = [row["state"], str(row["step"]), row["metric"], value]
            cost = ["" if usd is None else f"{usd:.2f}"] if self.usd else []
            rows.append([*(str(values.get(n, "")) for n in varied or names), *told, *cost])
        return table(rows, [*head, *(["dollars"] if self.usd else [])])

    def _charts(self) -> Iterator[str]:
        began = [each for each in self.runs if each.head is not None]
        steps = [(each.run.name, each.history.steps.by_stage()) for each in began]
        losses = []
        for name, stages in steps:
            for last in list(stages.values())[-1:]:
                losses.append(Curve(name=name, x=last["step"], y=last["loss"]))
        yield chart(losses, y_label="loss")
        metrics = dict.fromkeys(n for each in began for e in each.evaluations for n in e["metrics"])
        for metric in list(metrics)[:_MOST_CURVES]:
            curves = []
            for each in began:
                points = [(e["step"], e["metrics"].get(metric)) for e in each.evaluations]
                known = [(step, value) for step, value in points if value is not None]
                x, y = [step for step, _ in known], [value for _, value in known]
                curves.append(Curve(name=each.run.name, x=x, y=y))
            yield chart(curves, y_label=metric)
