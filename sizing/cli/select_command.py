"""Select sizes for a phase of a model's life: candidates by dollars, with reasons.

  python -m sizing select --phase train --gpu-memory-mib 20000
  python -m sizing select --phase experiment --cpu-percent 15 --hours-per-day 6
  python -m sizing select --phase serve-batch --model bert-base

Example: BERT for sentiment analysis, 1,000 requests per minute within 200 ms:

  python -m sizing select --phase serve-online --model bert-base \\
      --requests-per-minute 1000 --latency-ms 200

If you measured a throughput, --throughput c5.xlarge=55 replaces the published one.

Find a cheaper size for an endpoint from the share of its GPU or CPUs in use. Candidates would be at
most 70 % busy, modelled by memory bandwidth and half-precision peak, or by vCPUs; measure them.

  python -m sizing select --instead-of p3.2xlarge --gpu-percent 10
  python -m sizing select --instead-of g5.12xlarge --gpu-percent 15 --gpu-memory-mib 9000
  python -m sizing select --instead-of c5.2xlarge --cpu-percent 12 --memory-gib 3
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from contract.suggestion import suggest
from sizing import catalogue
from sizing.catalogue import InstanceType
from sizing.catalogue.prices import age_note
from sizing.cli.shared_options import COUNT, NUMBER, add_price_arguments, price_book
from sizing.cli.tables import print_json, show_table
from sizing.models.serving import Throughput, models
from sizing.select.ranking import PHASES, Requirements, SizeSelection, select
from sizing.select.rightsizing import rightsize

HELP = "sizes for experiments, data preparation, training, tuning or serving; cheaper endpoints"
SHOWN = 12
_MOVES = 8


_INSTEAD = "instead-of"
_SERVE, _FIT = ("serve-online", "serve-batch"), ("train", "tune")
_WORK = ("experiment", "prepare")


def _pairs(unit: str) -> dict[str, Any]:
    return {"action": "append", "default": [], "metavar": f"SIZE={unit}"}


# How argparse reads each option, its help, and its phases.
_OPTIONS: Mapping[str, tuple[Mapping[str, Any], str, tuple[str, ...]]] = {
    "model": ({}, f"published throughputs exist for {', '.join(models())}", _SERVE),
    "throughput": (_pairs("PER_SECOND"), "measured", _SERVE),
    "latency": (_pairs("MS"), "latency of one inference", ("serve-online",)),
    "requests_per_minute": (NUMBER, "serve-online: the demand", ("serve-online",)),
    "latency_ms": (NUMBER, "serve-online: latency goal for 95 %% of requests", ("serve-online",)),
    "gpu_percent": (NUMBER, "instead-of: GPU utilization", (_INSTEAD,)),
    "gpu_memory_mib": (
        *(COUNT, "train, tune: the need that plan shows; instead-of: in use"),
        (*_FIT, _INSTEAD),
    ),
    "memory_gib": (
        *(NUMBER, "least host memory; instead-of: in use, without a GPU"),
        (*_FIT, *_WORK, _INSTEAD),
    ),
    "vcpus": (COUNT, "at least this many", (*_FIT, *_WORK)),
    "cpu_percent": (
        *(NUMBER, "mean load of all vCPUs (experiment: default 20)"),
        ("experiment", _INSTEAD),
    ),
    "hours_per_day": (NUMBER, "experiment, prepare: hours it is on (default: 8)", _WORK),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--phase", choices=PHASES, metavar="PHASE", help=", ".join(PHASES))
    question.add_argument("--instead-of", metavar="SIZE", help="the size that is serving now")
    for name, (kind, text, _) in _OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), help=text, **kind)
    add_price_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the ranking."""
    if arguments.instead_of:
        return _rightsize(arguments)
    prices = price_book(arguments).find
    requirements = make_requirements(arguments)
    selection = select(requirements, prices)
    if not selection.candidates:
        reasons = "; ".join(f"{size}: {why}" for size, why in selection.left_out.items())
        raise ValueError(f"no size meets the requirements: {reasons or 'no throughput is known'}")
    if arguments.json:
        print_json("select", asdict(selection))
    else:
        show_selection(selection, requirements.phase)
        used = (price for each in selection.candidates for price in prices(each.size))
        show_table([], notes=[age_note(used)])
    return 0


def _rightsize(arguments: argparse.Namespace) -> int:
    """Print the sizes that would handle the load for less."""
    _given(arguments, _INSTEAD)
    instance, prices = catalogue.find(arguments.instead_of), price_book(arguments).find
    percent, memory_mib = _in_use(arguments, instance)
    moves = rightsize(instance.size, percent, prices, memory_mib=memory_mib)
    rows = [asdict(move) for move in moves]
    if arguments.json:
        print_json("select", {"size": instance.size, "in_use_percent": percent, "moves": rows})
        return 0
    notes = [] if rows else [f"no cheaper size carries {percent:g} % of {instance.size}: keep it"]
    priced = [instance.size, *(move.size for move in moves)]
    notes.append(age_note(prices(each)[0] for each in priced))
    show_table(rows[:_MOVES], title=f"{instance.size} at {percent:g} %: cheaper sizes", notes=notes)
    return 0


def _in_use(arguments: argparse.Namespace, instance: InstanceType) -> tuple[float, float | None]:
    """Return the percent and the MiB in use: of the GPU, or of a host without one."""
    has_gpu = instance.num_gpus > 0
    if instance.num_accelerators and not has_gpu:
        raise ValueError(f"{instance.size} has no NVIDIA GPU: its speed cannot be compared")
    percent = arguments.gpu_percent if has_gpu else arguments.cpu_percent
    if percent is None:
        option = "--gpu-percent" if has_gpu else "--cpu-percent"
        raise ValueError(f"add {option}: the share of {instance.size} that is in use")
    if has_gpu:
        return percent, arguments.gpu_memory_mib
    if arguments.gpu_memory_mib is not None:
        raise ValueError(f"{instance.size} has no GPU: add --memory-gib")
    return percent, arguments.memory_gib and arguments.memory_gib * 1024


def _given(arguments: argparse.Namespace, phase: str) -> dict[str, Any]:
    """Return the options in use; a ValueError if they are not for this phase."""
    given = {name: getattr(arguments, name) for name in _OPTIONS}
    # Keep a zero: it is refused below.
    given = {k: v for k, v in given.items() if v is not None and v is not False and v != []}
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        phases = _OPTIONS[name][2]
        if phase not in phases:
            raise ValueError(
                f"{option} is for {' or '.join(phases)}, not for {phase}: leave it out"
            )
        if isinstance(value, int | float) and not 0 < value < 1e9:
            raise ValueError(f"{option} must be above 0 and below 1e9, got {value:g}")
    if given.get("cpu_percent", 0) > 100 or given.get("hours_per_day", 0) > 24:
        raise ValueError("--cpu-percent is at most 100 and --hours-per-day at most 24")
    return given


def make_requirements(arguments: argparse.Namespace) -> Requirements:
    """Return the requirements; a ValueError if options contradict each other."""
    given = _given(arguments, arguments.phase)
    throughputs = _own(given.pop("throughput", []), given.pop("latency", []))
    if arguments.phase.startswith("serve"):
        _check_serving(arguments, throughputs)
    return Requirements(phase=arguments.phase, throughputs=throughputs, **given)


def _check_serving(arguments: argparse.Namespace, throughputs: dict[str, Throughput]) -> None:
    """Refuse serving without a throughput, or serving online without a demand and a goal."""
    if arguments.model is None and not throughputs:
        raise ValueError(
            f"{arguments.phase} needs --model ({', '.join(models())}) or --throughput SIZE=N"
        )
    if arguments.model is not None and arguments.model not in models():
        raise ValueError(
            f"no published throughput of {arguments.model!r}; add --throughput SIZE=N "
            f"({suggest(arguments.model, models(), cutoff=0.3)})"
        )
    if arguments.phase == "serve-online" and None in (
        arguments.requests_per_minute,
        arguments.latency_ms,
    ):
        raise ValueError("serve-online needs --requests-per-minute and --latency-ms")


def _own(throughputs: list[str], latencies: list[str]) -> dict[str, Throughput]:
    """Return the user's own throughputs, which replace published ones."""
    times = dict(_pair("--latency", text) for text in latencies)
    own = {}
    for size, per_second in (_pair("--throughput", text) for text in throughputs):
        own[size] = Throughput(
            size=size,
            per_second=per_second,
            latency_ms=times.pop(size, None),
            basis="given",
            note="given with --throughput",
            source="the command line",
        )
    for size in times:
        raise ValueError(f"--latency {size} needs --throughput {size}=N: use both")
    return own


def _pair(option: str, text: str) -> tuple[str, float]:
    size, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise ValueError(f"{option} takes SIZE=NUMBER, such as c5.xlarge=55, got {text!r}")
    return catalogue.find(size).size, value


def show_selection(selection: SizeSelection, phase: str) -> None:
    """Show the candidates, then reasons and cautions, then what was left out."""
    shown = selection.candidates[:SHOWN]
    show_table([{"size": each.size, **each.figures} for each in shown])
    lines: list[str] = []
    for place, each in enumerate(shown[:3], start=1):
        lines.append(f"{place}. {each.size}: {'; '.join(each.reasons)}.")
        lines += [f"   note: {caution}" for caution in each.cautions]
    later: list[Any] = [each for each in selection.candidates[3:] if not each.is_supported]
    lines += [f"{each.size} is last: {each.cautions[0]}." for each in later]
    if hidden := len(selection.candidates) - len(shown):
        lines.append(f"{hidden} more expensive ones are not shown (--json has them).")
    reasons: dict[str, list[str]] = {}
    for size, why in selection.left_out.items():
        reasons.setdefault(why, []).append(size)
    lines += [f"left out: {', '.join(sizes)} ({why})" for why, sizes in reasons.items()]
    if phase in ("train", "tune"):
        lines.append(
            "Dollars per hour are not dollars per run: see python -m sizing plan and advise."
        )
    lines += [f"differs from common advice: {line}" for line in selection.differs]
    show_table([], notes=lines)
