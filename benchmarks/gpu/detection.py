"""The detector on a GPU: which attention, how exact, and its step compared with transformers'."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.gpu.detection_contender import Contender, Part
from benchmarks.gpu.session import Session
from training.workloads.detection.attention import IMPLEMENTATIONS, Implementation, choose
from training.workloads.detection.attention import deformable_attention as attend

_SHAPES = ((40, 60), (20, 30), (10, 15), (5, 8))
_QUERIES = 500
_STEPS = {"warm_steps": 5, "num_steps": 20}
_DRY_STEPS = {"warm_steps": 1, "num_steps": 1}
_LEAST_SECONDS = 15.0


def detector(session: Session) -> None:
    """What is chosen, how far the others are from it, and milliseconds compared with peers."""
    device = session.device
    chosen = choose(device, torch.float32, deterministic=False)
    is_wrong = not session.is_dry and chosen != "triton"
    session.row("chosen", chosen, "WRONG: the Triton kernel does not work here" if is_wrong else "")
    given = _given(device)
    expected = _step("reference", given)
    for implementation in IMPLEMENTATIONS:
        # A dry run has no GPU to compile for.
        if implementation != "reference" and not (
            session.is_dry and implementation != "deterministic"
        ):
            found = _step(implementation, given)
            apart = max(
                float((one - other).abs().max() / other.abs().max())
                for one, other in zip(found, expected, strict=True)
            )
            what = f"{implementation} from reference, largest relative difference"
            session.row(what, f"{apart:.1e}", "" if apart < 1e-3 else "WRONG")
    torch.use_deterministic_algorithms(True)
    twice = [_step("deterministic", given) for _ in range(2)]
    torch.use_deterministic_algorithms(False)
    is_same = all(torch.equal(one, other) for one, other in zip(*twice, strict=True))
    session.row("deterministic, twice", "the same bits" if is_same else "DIFFERS")
    for part in get_args(Part):
        if part == "step" or not session.is_dry:
            _beside_peers(session, part)


def _beside_peers(session: Session, part: Part) -> None:
    """A row for each contender: milliseconds, memory, and the ratio to the best peer."""
    found = [(each, _measured(session, each)) for each in _contenders(part, session)]
    peers = [x["seconds"] for each, x in found if not each.is_ours and "failed" not in x]
    for contender, result in found:
        what = f"{part}: {contender.name}"
        if "failed" in result:
            session.row(what, "not measured", f"FAILED: {result['failed']}")
            continue
        ratio = f"{min(peers) / result['seconds']:.2f} x best peer, " if peers else ""
        figures = f"{1000 * result['seconds']:,.1f} ms, {ratio}{result['mib']:,} MiB"
        millions = f"{result['parameters'] / 1e6:,.2f} M parameters"
        session.row(what, figures, millions if result["parameters"] else "")


def _contenders(part: Part, session: Session) -> Iterator[Contender]:
    """Ours and its peers."""
    scale = "tiny" if session.is_dry else "reference"
    common: dict[str, Any] = {"part": part, "scale": scale, "device": session.device.type}
    # A dry run has no GPU to compile for.
    ours = [each for each in IMPLEMENTATIONS if each != "triton" or not session.is_dry]
    if part != "step":
        for implementation in ours:
            yield Contender(who="ours", implementation=implementation, **common)
        yield Contender(who="transformers", **common)
        if not session.is_dry:
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


def _measured(session: Session, contender: Contender) -> dict[str, Any]:
    """What a process of its own says; `failed` has its last words."""
    if session.seconds_left < _LEAST_SECONDS:
        return {"failed": "no time was left"}
    steps = _DRY_STEPS if session.is_dry else _STEPS
    given = json.dumps({"contender": asdict(contender), **steps})
    command = [sys.executable, "-m", "benchmarks.gpu.detection_contender", given]
    try:
        found: dict[str, Any] = session.ask("contender", command)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)[:160]}
    return found


def _given(device: torch.device) -> list[Tensor]:
    """Values, locations (some outside) and weights of two images."""
    rng, tokens = torch.Generator().manual_seed(0), sum(h * w for h, w in _SHAPES)
    given = [
        torch.randn(2, tokens, 8, 32, generator=rng),
        1.2 * torch.rand(2, _QUERIES, 8, 4, 4, 2, generator=rng) - 0.1,
        torch.rand(2, _QUERIES, 8, 4, 4, generator=rng),
    ]
    return [each.to(device) for each in given]


def _step(implementation: Implementation, given: list[Tensor]) -> list[Tensor]:
    """The output and the three gradients."""
    inputs = [each.clone().requires_grad_() for each in given]
    out = attend(inputs[0], _SHAPES, inputs[1], inputs[2], implementation)
    return [out.detach(), *torch.autograd.grad(out, inputs, out.detach())]
