"""Contenders in turns, and the table: tokens a second, memory, and ratios of one run.

On a GPU each is alone; the first rows are ours within the memory of an A10G.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.contender_process import alone, in_turns
from benchmarks.gpu.session import REPOSITORY
from benchmarks.language.contender import Contender
from benchmarks.language.shapes import PHASES, SCALES, flops_per_step
from training.growth.model import parameter_counts

# What an A10G has, by EC2's own description of g5: less than the 24 GB of its name.
A10G_MIB = 22_888
_MODULE = "benchmarks.language"
_ON_GPU: dict[str, Any] = {"warm_steps": 3, "num_steps": 10, "least_seconds": 20.0}


def measure(
    *,
    scale: str | None = None,
    rounds: int,
    seconds: float,
    phases: Sequence[str] = (),
    cpu: bool = False,
) -> list[dict[str, Any]]:
    """Rows of all contenders; on a GPU within `seconds`, of which the last ones may get nothing."""
    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    scale = scale or ("full" if device == "cuda" else "eighth")
    if scale not in SCALES:
        raise ValueError(f"there is no scale {scale!r}; give one of {', '.join(SCALES)}")
    if unknown := sorted(set(phases) - set(PHASES)):
        raise ValueError(f"there is no phase {unknown[0]!r}; give some of {', '.join(PHASES)}")
    if rounds < 1:
        raise ValueError(f"give at least one round, got {rounds}")
    deadline = time.monotonic() + seconds
    machine = _machine(device)
    limit = A10G_MIB - machine["context_mib"] if device == "cuda" else None
    chosen = phases or PHASES
    # First what has to be shown on a GPU, as time may end before the last rows.
    where = f"{limit} MiB" if limit else "less memory"
    groups = [(f"{p}, {where}", list(_lean(p, scale, device, limit))) for p in chosen]
    groups += [(phase, list(_contenders(phase, scale, device))) for phase in chosen]
    rows = [_row("machine", machine["name"], {"failed": machine["note"]})]
    for name, contenders in groups:
        if device == "cpu":
            results = in_turns(_MODULE, contenders, rounds)
        else:
            results = [alone(_MODULE, each, deadline, **_ON_GPU) for each in contenders]
        rows += _rows(name, contenders, results, machine["flops"])
    return rows


def _contenders(phase: str, scale: str, device: str) -> Iterator[Contender]:
    """Ours and its peers."""
    common: dict[str, Any] = {"phase": phase, "scale": scale, "device": device}
    if phase == "dense":
        for who in ("ours", "Hugging Face", "plain loop"):
            yield Contender(who=who, **common)
        return
    for experts in ("split", "bmm", "grouped_mm"):
        yield Contender(who="ours", experts=experts, **common)
    for experts in ("eager", "grouped_mm"):
        yield Contender(who="ours gated", experts=experts.replace("eager", "split"), **common)
        yield Contender(who="Hugging Face", experts=experts, **common)
    yield Contender(who="plain loop", **common)


def _lean(phase: str, scale: str, device: str, limit_mib: int | None) -> Iterator[Contender]:
    """Ours within a smaller GPU's memory; the last phase in every way that saves some."""
    common: dict[str, Any] = {"who": "ours", "phase": phase, "scale": scale, "device": device}
    common |= {"limit_mib": limit_mib, "experts": "" if phase == "dense" else "split"}
    if phase == "grown":
        yield Contender(**common, recompute=True, in_backward=True)
        yield Contender(**common, in_backward=True, bfloat16_moments=True)
        yield Contender(**common, recompute=True, in_backward=True, bfloat16_moments=True)
    elif limit_mib:
        yield Contender(**common)


def _rows(
    name: str,
    contenders: Sequence[Contender],
    results: Sequence[dict[str, Any]],
    product_flops: float,
) -> list[dict[str, Any]]:
    """The rows of one phase; ours with less memory have no peers."""
    peers = [
        r["seconds"]
        for c, r in zip(contenders, results, strict=True)
        if not c.is_ours and "seconds" in r and "failed" not in r
    ]
    rows = []
    for contender, result in zip(contenders, results, strict=True):
        row = _row(name, contender.name, result)
        if "failed" not in result:
            scale, config = SCALES[contender.scale], contender.config
            seconds = result["seconds"]
            row["tokens/s"] = f"{scale.tokens_per_step / seconds:,.0f}"
            row["x best peer"] = f"{min(peers) / seconds:.2f}" if peers else ""
            flops = flops_per_step(config, parameter_counts(config)[1], scale)
            row["% of a product"] = f"{100 * flops / seconds / product_flops:.0f}"
        rows.append(row)
    return rows


def _row(phase: str, who: str, result: dict[str, Any]) -> dict[str, Any]:
    parameters = result.get("parameters")
    return {
        "phase": phase,
        "who": who,
        "parameters, M": f"{parameters / 1e6:,.2f}" if parameters else "",
        "tokens/s": "",
        "x best peer": "",
        "% of a product": "",
        "peak MiB": f"{result['mib']:,}" if "mib" in result else "",
        "note": result.get("failed", ""),
    }


def _machine(device: str) -> dict[str, Any]:
    """What one matrix product reaches, and what a context takes of a GPU's memory."""
    code = "from benchmarks.language.product import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, device],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
