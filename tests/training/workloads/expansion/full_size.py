"""One transition of the seed document's models at full size, measured: prints a line of JSON.

python -m tests.training.workloads.expansion.full_size experts|grown|literal
"""

import json
import resource
import sys
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from training.workloads.expansion import (
    block_origins,
    deepen,
    deepen_optimizer,
    evenly_after,
    fill,
    observe,
    upcycle,
    upcycle_optimizer,
    verify,
    widen,
    widen_optimizer,
)
from training.workloads.expansion.verify import Verification
from training.workloads.growth.config import ModelConfig, full, literal
from training.workloads.growth.model import LanguageModel
from training.workloads.growth.transitions import _ROUTER, growth_layout

TWICE = {"width": 2, "heads": 2, "hidden": 2}
AFTER = evenly_after(7, 4)
TRANSITIONS: dict[str, tuple[ModelConfig, ModelConfig]] = {
    "experts": (full().dense_model, full().experts_model),
    "grown": (full().experts_model, full().grown_model),
    "literal": (literal().experts_model, literal().grown_model),
}


def committed(config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """A model's state and its optimizer's, every page of them written."""
    torch.manual_seed(0)
    model = dict(LanguageModel(config).state_dict())
    step = torch.tensor(1000.0)
    return model, {
        name: {"step": step, "exp_avg": own * 0.1, "exp_avg_sq": own.square()}
        for name, own in model.items()
    }


def transition(name: str, noise: float = 0.1) -> dict[str, float | list[str]]:
    """Grow a commit into a fresh model, read the moments one by one, and verify."""
    before, after = TRANSITIONS[name]
    layout = growth_layout()
    prior, moments = committed(before)
    sizes = {"prior": _gb(prior), "moments": sum(_gb(own) for own in moments.values())}
    torch.manual_seed(1)
    grown_model = LanguageModel(after)
    fresh = grown_model.state_dict()
    start = time.monotonic()
    if name == "experts":
        fill(grown_model, upcycle(prior, layout, num_experts=8, fresh=fresh))
        state = upcycle_optimizer(moments, layout, num_experts=8, top_k=2)
    else:
        wide = widen(prior, layout, TWICE, split_noise=noise)
        fill(grown_model, deepen(wide, layout, after=AFTER, fresh=fresh))
        wide_state = widen_optimizer(moments, layout, TWICE, rewarm_steps=100)
        state = deepen_optimizer(wide_state, layout, num_blocks=7, after=AFTER)
    grown_seconds = time.monotonic() - start
    # As the engine does: each parameter's moments are made, sent to the device, and dropped.
    for each in state.values():
        del each
    moments_seconds = time.monotonic() - start - grown_seconds
    found = _verified(before, prior, grown_model, is_wider=name != "experts")
    return {
        **found.facts,
        "max_logit": found.max_logit,
        "failures": list(found.failures),
        **{f"{part}_gb": size for part, size in sizes.items()},
        "grown_gb": _gb(fresh),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "model_seconds": grown_seconds,
        "moments_seconds": moments_seconds,
        "verify_seconds": time.monotonic() - start - grown_seconds - moments_seconds,
    }


def _verified(
    before: ModelConfig, prior: Mapping[str, Tensor], after: LanguageModel, *, is_wider: bool
) -> Verification:
    with torch.device("meta"):
        small = LanguageModel(before, initialize=False)
    small.load_state_dict(prior, assign=True)
    ids = torch.randint(before.vocab_size, (16, 17), generator=torch.Generator().manual_seed(2))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    router = _ROUTER if is_wider else None
    origins = block_origins(7, AFTER) if is_wider else None
    return verify(
        observe(small, lambda: small(inputs), targets, router=router),
        observe(after, lambda: after(inputs), targets, router=_ROUTER, origins=origins),
        top_k=2,
    )


def _gb(tensors: Mapping[str, Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors.values()) / 1e9


if __name__ == "__main__":
    print(json.dumps(transition(sys.argv[1])))
