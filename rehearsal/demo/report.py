"""A receipt for readers: its verdict, its rows, and a page with the machines and the losses."""

import html
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from contract.goodput import Goodput
from contract.lineage import Line
from contract.readable import shown
from contract.report import Bar, Curve, chart, page, table, timeline

_NO_ORDER = (
    "Each step saw the entire dataset, so this proves nothing about the order of samples: use more "
    "data than one batch."
)

# The rows that come first, also on the page: what was trained, is it good, what did it cost, what
# was lost.
_NUM_FIRST = 6


def receipt_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the receipt's rows for readers, each a name and a value."""
    return _program_rows(receipt) if "program" in receipt else _workload_rows(receipt)


def show_receipt(rows: Sequence[tuple[str, str]], console: Console) -> None:
    """Print the receipt's rows as a table."""
    table = Table(show_header=False, title="receipt", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text.from_ansi(shown(value)))
    console.print(table)


def verdict(receipt: Mapping[str, Any], faults: Sequence[str]) -> str:
    """Return one sentence that says whether the promises were kept; `faults` are those broken."""
    if faults:
        return f"{len(faults)} promise{'s were' if len(faults) > 1 else ' was'} broken."
    number = receipt["interruptions"]
    survived = f"Every promise was kept through {number} interruption{'s' if number != 1 else ''}"
    if "program" in receipt:
        unknown = "" if _result_of(receipt)[0] else " It left no file to compare."
        return f"{survived}: the program came back after each one, and finished.{unknown}"
    equal = f"{survived}: weights and losses equal the uninterrupted run's, bit for bit."
    return equal if receipt["samples_have_order"] else f"{equal} {_NO_ORDER}"


def write_report(
    path: Path,
    receipt: Mapping[str, Any],
    curves: Mapping[str, Sequence[Sequence[Line]]],
    rows: Sequence[tuple[str, str]],
    faults: Sequence[str],
) -> None:
    """Write the page; `curves` are the steps of the interrupted and the uninterrupted run."""
    title = receipt.get("program") or f"{receipt['workload']} / {receipt['recipe']}"
    broken = "".join(f"<li>{html.escape(fault)}</li>" for fault in faults)
    written = page(
        title=f"Rehearsal of {title}",
        verdict=verdict(receipt, faults),
        tone="bad" if faults else "good",
        sections={
            "": (f"<ul>{broken}</ul>" if broken else "") + table(rows[:_NUM_FIRST]),
            "Machines": timeline(map(_machine, receipt["machines"]))
            + '<p class="quiet">Grey: user data and the start of the trainer, until its first line '
            "of metrics. Blue: preparation and training, including the rest of a notice after its "
            "commit.</p>",
            "Loss": "".join(_losses(name, *steps) for name, steps in curves.items())
            + '<p class="quiet">Each step of a workload once, as its receipt counts them; those of '
            "a program as it reported them. Dashed, on top: the uninterrupted run. A dotted line "
            "is an interruption.</p>",
            "Receipt": table(rows[_NUM_FIRST:]),
        },
    )
    path.write_text(written, encoding="utf-8")


def _machine(machine: Mapping[str, Any]) -> tuple[str, Sequence[Bar], str]:
    """Return a machine's line in the timeline."""
    ready = machine["seconds_to_first_progress"]
    boot = machine["seconds"] if ready is None else min(ready, machine["seconds"])
    trained = Bar(start=machine["at"] + boot, seconds=machine["seconds"] - boot, kind="trained")
    booted = Bar(start=machine["at"], seconds=boot, kind="boot")
    return machine["instance"], [booted, trained], str(machine["ended"])


def _losses(name: str, interrupted: Sequence[Line], uninterrupted: Sequence[Line]) -> str:
    pairs = itertools.pairwise(interrupted)
    marks = [step["step"] for last, step in pairs if step["generation"] != last["generation"]]
    curves = [
        Curve(name=of, x=[s["step"] for s in steps], y=[s["loss"] for s in steps], is_reference=ref)
        for of, steps, ref in (
            ("interrupted", interrupted, False),
            ("uninterrupted", uninterrupted, True),
        )
    ]
    return chart(curves, y_label=f"loss of {name}", marks=marks)


def _workload_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    equal = (
        receipt["weights_sha256"] == receipt["uninterrupted_weights_sha256"]
        and receipt["losses_equal"]
    )
    commit = receipt["notice_to_commit_seconds"]
    gained = sum(item.get("gained_steps", 0) for item in receipt["interruption_list"])
    return [
        ("trained", f"{receipt['workload']} by the recipe {receipt['recipe']}"),
        *_result(receipt),
        ("equal bit for bit", "yes, weights and losses" if equal else "NO"),
        *([] if "job" in receipt else _cost_rows(receipt)),
        ("steps lost", f"{receipt['steps_lost']} (done again, never skipped)"),
        ("steps", f"{receipt['steps']} in the lineage, {receipt['steps_computed']} computed"),
        _interruptions(receipt),
        (
            "notice to commit",
            f"{'never' if commit is None else f'{commit:.2f} s'} of {receipt['notice_seconds']:g} s"
            " (the demo's notice; EC2 gives 120 s)"
            + (f", then {gained} more steps, committed" if gained else ""),
        ),
        *_start_rows(receipt),
        *_end_rows(receipt),
        ("weights", receipt["weights_sha256"]),
        ("uninterrupted", receipt["uninterrupted_weights_sha256"]),
    ]


def _interruptions(receipt: Mapping[str, Any]) -> tuple[str, str]:
    what = "; ".join(item["what"] for item in receipt["interruption_list"])
    return "interruptions", f"{receipt['interruptions']}: {what}"


def _result(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the accuracy with its baselines and what it is a share of; or else the last stage's
    first metric by stage.
    """
    if (accuracy := receipt["validation_accuracy"]) is not None:
        baselines = receipt["baseline_accuracies"].items()
        others = "".join(f"; {name.replace('_', ' ')} {value:.3f}" for name, value in baselines)
        if baselines:
            away = accuracy - max(value for _, value in baselines)
            others += f": {abs(away):.3f} {'above' if away > 0 else 'below'} the best of these"
        return [("validation accuracy", f"{accuracy:.3f}{others}"), *_meaning(receipt["facts"])]
    stages = receipt["stages"]
    metric = next(iter(list(stages.values())[-1]))
    found = [f"{stage} {m[metric]:.4g}" for stage, m in stages.items() if metric in m]
    return [(f"validation {metric}", "; ".join(found))]


def _meaning(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say what an accuracy is a share of, and what a guess has, as far as these are known."""
    parts = ((*name.partition("_"), number) for name, number in facts.items())
    of = {split: f"{number:g} {what}" for split, _, what, number in parts}
    if not of.keys() >= {"train", "validation", "chance"}:
        return []
    what = f"of {of['validation']} held out of the training on {of['train']}, the share classified"
    return [("which means", f"{what} right; a guess has {facts['chance']:.3f}")]


def _program_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    redone = receipt["steps_redone"]
    # A machine that is killed cannot say what it has done since its last line.
    least = "" if all(item["notice"] for item in receipt["interruption_list"]) else "at least "
    return [
        ("program", f"{receipt['program']}, in {receipt['attempts']} attempts"),
        ("last metrics", _figures(receipt["last_metrics"])),
        ("uninterrupted", _figures(receipt["uninterrupted_last_metrics"])),
        ("equal bit for bit", _equality(receipt)),
        *_cost_rows(receipt),
        ("time lost", f"{least}{receipt['seconds_lost']:.1f} s of work that no snapshot had yet"),
        *(("warning", text) for text in receipt["warnings"]),
        (
            "steps",
            (f"{receipt['steps']} in the run" if receipt["steps"] else "none reported")
            + (f", {redone} of them done again" if receipt["steps"] and redone is not None else ""),
        ),
        _interruptions(receipt),
        ("snapshots", f"{receipt['snapshots']} of its checkpoint folder"),
        ("model", ", ".join(_result_of(receipt)[0]) or "it left no file"),
        *_start_rows(receipt),
        *_end_rows(receipt),
    ]


def _result_of(receipt: Mapping[str, Any], run: str = "") -> tuple[Line, Line]:
    """Return the checksums of what a program left, and its losses by step.

    The files are those of its model and output; without a model, also of its checkpoints. If it
    names no steps, the losses are the last ones by name.
    """
    files = {**receipt[f"{run}final_files"], **receipt.get(f"{run}checkpoint_files", {})}
    reported = {line["step"]: line["loss"] for line in receipt.get(f"{run}losses", ())}
    last = receipt[f"{run}last_metrics"].items()
    return files, reported or {name: value for name, value in last if "loss" in name}


def _equality(receipt: Mapping[str, Any]) -> str:
    """Say what of a program's result was compared with the uninterrupted run's, and what not."""
    (files, ours), (others, theirs) = _result_of(receipt), _result_of(receipt, "uninterrupted_")
    equal_files, of_files = _compared("files", files, others, sorted({**files, **others}))
    equal_losses, losses = _compared("reported losses", ours, theirs, sorted({*ours} & {*theirs}))
    if False not in (equal_files, equal_losses):
        return f"{'yes' if equal_files else 'not compared'}; {of_files}; {losses}"
    why = (
        "a saved file's bytes may differ although its tensors are equal"
        if equal_losses
        else "this program's result depends on its interruptions; a workload's does not "
        "(docs/your-program.md)"
    )
    return f"no: {why}; {of_files}; {losses}"


def _compared(what: str, ours: Line, theirs: Line, keys: Sequence[Any]) -> tuple[bool | None, str]:
    """Return whether these are equal, None if there are none, and what to say of them."""
    differ = [key for key in keys if ours.get(key) != theirs.get(key)]
    if not keys:
        return None, f"{what}: not compared, as the runs have none in common"
    first = f"{len(differ)} of {len(keys)} differ, first {differ[0]}" if differ else ""
    return not differ, f"{what}: {first or f'all {len(keys)} equal'}"


def _start_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows about what existed before the first step."""
    made = ("stack resources", f"{receipt['resources']} created, each checked by its own API")
    if "job" in receipt:
        return [made, ("training job", receipt["job"])]
    data = receipt["dataset"]
    size = f"{data['megabytes']:.1f} MB, {data['megabytes_per_second']:.1f} MB/s"
    if data["megabytes"] < 1:
        size = "less than 1 MB: too little for a rate"
    return [made, ("dataset synced", f"{data['files']} files, {size}")]


def _cost_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows about costs."""
    bought = receipt["goodput"]
    parts = Goodput(**{name: bought[name] for name in ("seconds", "usd", "planned")})
    return [("it bought", parts.sentence())]


def _end_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows about what was left running, the Guard and IAM."""
    again = receipt.get("guard_retries", 0)
    left = f"{receipt['instances_running']} instances, {receipt['processes_left']} processes"
    used = (
        f"{receipt['statements_used']} of {receipt['statements']} statements used, "
        f"{len(receipt['denied'])} calls denied"
    )
    if "job" in receipt:
        return [("left running", left), ("IAM", used)]
    return [
        ("fleet", f"target capacity {receipt['fleet_target_capacity']}"),
        ("left running", left),
        (
            "Guard",
            f"ran {receipt['guard_invocations']} times on the fleet's events"
            + (f", {again} of them retries after an error" if again else ""),
        ),
        ("IAM", used),
    ]


def _figures(metrics: Mapping[str, float]) -> str:
    figures = [f"{name} {value:.4g}" for name, value in metrics.items()]
    return ", ".join(figures) or "none in the last attempt"
