"""Contenders in turns, and the table: milliseconds, memory, and ratios of one run."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch

from benchmarks.contender_process import alone, in_turns
from benchmarks.detection.contender import Contender, Part
from benchmarks.detection.scales import SCALES
from training.workloads.detection.attention import IMPLEMENTATIONS

_MODULE = "benchmarks.detection"
_ON_GPU: dict[str, Any] = {"warm_steps": 5, "num_steps": 20, "least_seconds": 15.0}


def measure(
    *,
    scale: str | None = None,
    rounds: int,
    seconds: float,
    parts: Sequence[str] = (),
    cpu: bool = False,
    compiled: bool = False,
) -> list[dict[str, Any]]:
    """Rows of all contenders; on a GPU within `seconds`, of which the last ones may get nothing."""
    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    scale = scale or ("reference_pair" if device == "cuda" else "laptop")
    if scale not in SCALES:
        raise ValueError(f"there is no scale {scale!r}; give one of {', '.join(SCALES)}")
    if unknown := sorted(set(parts) - set(get_args(Part))):
        raise ValueError(
            f"there is no part {unknown[0]!r}; give some of {', '.join(get_args(Part))}"
        )
    if rounds < 1:
        raise ValueError(f"give at least one round, got {rounds}")
    deadline, rows = time.monotonic() + seconds, []
    for part in get_args(Part):
        if parts and part not in parts:
            continue
        contenders = list(_contenders(part, scale, device, compiled or device == "cuda"))
        if device == "cpu":
            results = in_turns(_MODULE, contenders, rounds)
        else:
            results = [alone(_MODULE, each, deadline, **_ON_GPU) for each in contenders]
        rows += _rows(part, contenders, results)
    return rows


def _contenders(part: Part, scale: str, device: str, compiled: bool) -> Iterator[Contender]:
    """Ours and its peers."""
    common: dict[str, Any] = {"part": part, "scale": scale, "device": device}
    ours = [each for each in IMPLEMENTATIONS if each != "triton" or device == "cuda"]
    if part != "step":
        for implementation in ours:
            yield Contender(who="ours", implementation=implementation, **common)
        yield Contender(who="transformers", **common)
        if compiled:
            yield Contender(who="transformers", implementation="compiled", **common)
        return
    for implementation in ("triton", "deterministic", "reference"):
        if implementation in ours:
            for with_denoising in (False, True):
                yield Contender(
                    who="ours",
                    implementation=implementation,
                    with_denoising=with_denoising,
                    **common,
                )
    yield Contender(who="transformers", **common)


def _rows(
    part: Part, contenders: Sequence[Contender], results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    peers = [
        result["seconds"]
        for contender, result in zip(contenders, results, strict=True)
        if not contender.is_ours and "failed" not in result
    ]
    return [
        _row(part, contender.name, result, min(peers, default=None))
        for contender, result in zip(contenders, results, strict=True)
    ]


def _row(part: Part, who: str, result: dict[str, Any], best: float | None) -> dict[str, Any]:
    is_known = "failed" not in result
    parameters = result.get("parameters")
    return {
        "part": part,
        "who": who,
        "parameters, M": f"{parameters / 1e6:,.2f}" if parameters else "",
        "ms": f"{1000 * result['seconds']:,.1f}" if is_known else "",
        "x best peer": f"{best / result['seconds']:.2f}" if is_known and best else "",
        "peak MiB": f"{result['mib']:,}" if is_known else "",
        "note": result.get("failed", ""),
    }
