"""The detector on a GPU: which attention, how exact, and its step beside transformers'."""

import torch
from torch import Tensor

from benchmarks.detection import table
from benchmarks.gpu.session import Session
from training.workloads.detection.attention import IMPLEMENTATIONS, Implementation, choose
from training.workloads.detection.attention import deformable_attention as attend

_SHAPES = ((40, 60), (20, 30), (10, 15), (5, 8))
_QUERIES = 500


def detector(session: Session) -> None:
    """What is chosen, how far the others are from it, and milliseconds beside peers."""
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
    rows = table.measure(
        scale="tiny" if session.is_dry else None,
        rounds=1,
        seconds=session.seconds_left,
        parts=["step"] if session.is_dry else [],
        cpu=session.is_dry,
    )
    for row in rows:
        figures = f"{row['ms']} ms, {row['x best peer']} x best peer, {row['peak MiB']} MiB"
        failed = f"FAILED: {row['note']}" if row["note"] else ""
        session.row(f"{row['part']}: {row['who']}", figures, failed)


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
