"""One contender: a model with its optimizer, which makes steps and says how long they took."""

import gc
import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.contender_process import TimedSteps, resident_bytes
from benchmarks.language import peers
from benchmarks.language.shapes import SCALES, Scale, gated
from training.engine.in_backward import step_in_backward
from training.growth.architecture import ModelConfig
from training.growth.expert_products import check_products
from training.growth.model import LanguageModel
from training.growth.optimizer import BFloat16AdamW

Who: TypeAlias = Literal["ours", "ours gated", "Hugging Face", "plain loop"]
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """What one process trains, and how; as JSON its argument."""

    who: Who
    phase: str
    scale: str
    device: str
    experts: str = ""  # how they are computed
    recompute: bool = False
    in_backward: bool = False
    bfloat16_moments: bool = False
    limit_mib: int | None = None  # of GPU memory for tensors

    @property
    def config(self) -> ModelConfig:
        """The model's, with SwiGLU where the peer has it too."""
        config = SCALES[self.scale].models[self.phase]
        is_gated = self.who == "ours gated" or (self.who == "Hugging Face" and bool(self.experts))
        return gated(config) if is_gated else config

    @property
    def is_ours(self) -> bool:
        """Whether it is no peer."""
        return self.who.startswith("ours")

    @property
    def name(self) -> str:
        """For the table."""
        parts = [self.who, self.experts, "recompute" if self.recompute else ""]
        parts += ["in backward" if self.in_backward else ""]
        parts += ["bfloat16 moments" if self.bfloat16_moments else ""]
        # transformers casts to its weights' type, which autocast leaves in float32.
        stays_wide = self.who == "Hugging Face" and self.experts == "grouped_mm"
        parts += ["experts in float32" if stays_wide and self.device == "cuda" else ""]
        return ", ".join(part for part in parts if part)

    def to_json(self) -> str:
        """The process's argument."""
        return json.dumps(asdict(self))


class Trainer(TimedSteps):
    """A contender's model and optimizer."""

    def __init__(self, contender: Contender, floor_bytes: int = 0) -> None:
        super().__init__(contender.device, floor_bytes)
        scale: Scale = SCALES[contender.scale]
        if contender.limit_mib is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            share = min(1.0, contender.limit_mib * _MIB / total)
            torch.cuda.set_per_process_memory_fraction(share)
        with self._device:
            self.model, self.loss_of = _built(contender)
        kind = BFloat16AdamW if contender.bfloat16_moments else AdamW
        betas = (0.9, 0.95)
        self._optimizer: Optimizer = kind(self.model.parameters(), lr=1e-4, betas=betas, fused=True)
        self._in_backward = contender.in_backward
        if contender.in_backward:
            step_in_backward(self._optimizer)
        rng = torch.Generator().manual_seed(0)
        shape = (scale.batch, scale.num_tokens + 1)
        vocab_size = contender.config.vocab_size
        self._tokens = torch.randint(vocab_size, shape, generator=rng).to(self._device)

    def step(self) -> Tensor:
        """Make an optimizer step on the batch; return the loss before it."""
        # On the CPU in float32: bfloat16 is slow there.
        is_low = self._device.type == "cuda"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_low):
            loss = self.loss_of(self._tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._in_backward:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _built(contender: Contender) -> tuple[nn.Module, peers.LossOf]:
    config = contender.config
    if contender.is_ours:
        return _ours(contender, config)
    if contender.who == "plain loop":
        return peers.plain(config)
    if not contender.experts:
        return peers.hugging_face_dense(config)
    return peers.hugging_face_experts(config, cast(Any, contender.experts))


def _ours(contender: Contender, config: ModelConfig) -> tuple[nn.Module, peers.LossOf]:
    model = LanguageModel(config, recompute=contender.recompute)
    if contender.experts:
        model.compute_experts_by(check_products(contender.experts))

    def loss(tokens: Tensor) -> Tensor:
        found = model.loss(tokens[:, :-1], tokens[:, 1:])
        return found.total / tokens[:, 1:].numel() + peers.BALANCE * found.balance

    return model, loss


def main() -> int:
    """Be the contender of the command line."""
    contender = Contender(**json.loads(sys.argv[1]))
    # What libraries load with a first step is not the model's.
    Trainer(replace(contender, scale="tiny")).steps(1)
    gc.collect()
    trainer = Trainer(contender, resident_bytes("VmRSS"))
    trainer.answer(sum(parameter.numel() for parameter in trainer.model.parameters()))
    return 0
