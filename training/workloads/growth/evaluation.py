"""What held-out text says of a model: its perplexity, and how evenly its experts share the text.

B batch, T tokens, N = B x T, E experts, K experts of a token, L blocks with experts.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from training.workload import Batch, Partial
from training.workloads.growth.experts import ExpertFeedForward
from training.workloads.growth.model import LanguageModel

_LOADS_FILE = "experts.csv"


def partial(model: nn.Module, batch: Batch) -> Partial:
    """The cross-entropy of a batch, and the tokens of each expert."""
    tokens_BT = batch["tokens"]
    model = cast(LanguageModel, model)
    with _counting_experts(model) as counts:
        total = model.loss(tokens_BT[:, :-1], tokens_BT[:, 1:]).total
    loads = {"tokens_LE": torch.stack(counts).cpu()} if counts else {}
    return Partial(sums={"loss": (total.item(), float(tokens_BT[:, 1:].numel()))}, tensors=loads)


def predictions(model: LanguageModel, batch: Batch) -> list[dict[str, float]]:
    """The loss and the perplexity of each window by itself."""
    found = []
    for tokens_1T in batch["tokens"].split(1):
        total = model.loss(tokens_1T[:, :-1], tokens_1T[:, 1:]).total.item()
        loss = total / (tokens_1T.shape[1] - 1)
        found.append({"loss": loss, "perplexity": _perplexity(loss)})
    return found


@contextmanager
def _counting_experts(model: LanguageModel) -> Iterator[list[Tensor]]:
    """Yield a list that each block with experts adds its tokens by expert to, in order."""
    counts: list[Tensor] = []

    def count(top_k: int) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(router: nn.Module, inputs: object, logits_NE: Tensor) -> None:
            chosen_NK = logits_NE.topk(top_k, dim=-1).indices
            counts.append(chosen_NK.flatten().bincount(minlength=logits_NE.shape[-1]))

        return hook

    experts = [m for m in model.modules() if isinstance(m, ExpertFeedForward)]
    hooks = [each.router.register_forward_hook(count(each.top_k)) for each in experts]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def summarize(parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
    """Metrics of one evaluation; writes the experts' loads, if there are any, to `out`."""
    pairs = [part.sums["loss"] for part in parts]
    loss = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    metrics = {"perplexity": _perplexity(loss), "loss": loss}
    loads = [part.tensors["tokens_LE"] for part in parts if part.tensors]
    if loads:
        share_LE = _shares(torch.stack(loads).sum(dim=0))
        # 1: every expert has the same; the number of experts over top_k: two have everything.
        metrics["busiest_expert"] = float(share_LE.amax(dim=1).mean())
        metrics["idlest_expert"] = float(share_LE.amin(dim=1).mean())
        _write_loads(share_LE, out / _LOADS_FILE)
    return metrics


def _perplexity(loss: float) -> float:
    # Above e^60 the number says nothing more, and soon it would be none.
    return math.exp(min(loss, 60.0))


def _shares(tokens_LE: Tensor) -> Tensor:
    """Each expert's tokens as a multiple of its even share."""
    return tokens_LE * tokens_LE.shape[1] / tokens_LE.sum(dim=1, keepdim=True)


def _write_loads(share_LE: Tensor, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["block of experts", *(f"expert {e}" for e in range(share_LE.shape[1]))])
        for number, shares in enumerate(share_LE.tolist()):
            writer.writerow([number, *(f"{share:.2f}" for share in shares)])
