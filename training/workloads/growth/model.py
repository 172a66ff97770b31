"""A decoder whose feed-forward networks may be experts: rotary positions, norms first, biases.

The loss never holds all logits in memory: forward takes a chunk of C tokens at a time and computes
the gradients too. Only the initial weights are random: there is no dropout.
B batch, T tokens, D width, H heads, d width of a head, V vocabulary, N = B x T.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training.workloads.growth.config import Activation, Block, DenseBlock, ExpertBlock, ModelConfig
from training.workloads.growth.experts import ExpertFeedForward, ExpertProducts

# 1024 rows of GPT-2's vocabulary are 206 MB in float32, and enough to keep a GPU busy.
_CHUNK_TOKENS = 1024


def _sum_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, chunk_tokens: int = _CHUNK_TOKENS
) -> Tensor:
    """F.cross_entropy(F.linear(x, weight), targets, reduction="sum"), also under autocast."""
    dtype = x_ND.dtype
    if torch.is_autocast_enabled(x_ND.device.type):
        dtype = torch.get_autocast_dtype(x_ND.device.type)
    total = _SumCrossEntropy.apply(
        x_ND, weight_VD, targets_N, dtype, chunk_tokens, torch.is_grad_enabled()
    )
    return cast(Tensor, total)


class _SumCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        dtype: torch.dtype,
        chunk_tokens: int,
        is_training: bool,
    ) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            total, *gradients = _summed(
                x_ND, weight_VD, targets_N, dtype, chunk_tokens, is_training
            )
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        dx_ND, dweight_VD = ctx.saved_tensors
        # In place, because a copy of the weight's gradient might not fit into memory. Autograd
        # refuses a second backward through the same loss.
        return dx_ND.mul_(scale), dweight_VD.mul_(scale), None, None, None, None


def _summed(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    dtype: torch.dtype,
    chunk_tokens: int,
    is_training: bool,
) -> tuple[Tensor, ...]:
    """Return the sum and, if training, its gradients by `x_ND` and by `weight_VD`."""
    low_VD = weight_VD.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = x_ND.new_zeros((), dtype=wide)
    dx_ND = torch.empty_like(x_ND)
    dweight_VD = torch.zeros_like(weight_VD)
    for start in range(0, len(x_ND), chunk_tokens):
        stop = start + chunk_tokens
        x_CD, targets_C1 = x_ND[start:stop].to(dtype), targets_N[start:stop, None]
        logs_CV = torch.log_softmax(x_CD @ low_VD.T, dim=-1, dtype=wide)
        total -= logs_CV.gather(1, targets_C1).sum()
        if is_training:
            dlogits_CV = logs_CV.exp_()
            at_target_C1 = dlogits_CV.gather(1, targets_C1) - 1.0
            dlogits_CV = dlogits_CV.scatter_(1, targets_C1, at_target_C1).to(dtype)
            dx_ND[start:stop] = dlogits_CV @ low_VD
            if dtype == weight_VD.dtype:
                torch.addmm(dweight_VD, dlogits_CV.T, x_CD, out=dweight_VD)
            else:
                dweight_VD += dlogits_CV.T @ x_CD
    return (total, dx_ND, dweight_VD) if is_training else (total,)


_STD = 0.02


class _Hidden(NamedTuple):
    """The output of the blocks, and how evenly the routers distributed the tokens."""

    y_BTD: Tensor
    balance: Tensor  # mean over the blocks of experts; 1 is even
    busiest: Tensor  # likewise, of the busiest expert's tokens; 1 is its even share


class _TextLoss(NamedTuple):
    """The losses of a batch of texts; the last two are constants without experts."""

    total: Tensor  # summed over the tokens
    balance: Tensor
    busiest: Tensor


class LanguageModel(nn.Module):
    """Maps token ids (B, T) to logits (B, T, V).

    `initialize=False` leaves the weights unset, for callers that load them. `recompute` saves no
    activations within blocks, which backward computes again: a third more work, the same bits.
    """

    def __init__(
        self, config: ModelConfig, *, initialize: bool = True, recompute: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(_DecoderBlock(config, block) for block in config.blocks)
        self.final_norm = _norm(config)
        if not config.is_tied:
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if initialize:
            self.initialize()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(config.has_biases or not name.endswith("bias"))

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw initial weights; what a block adds to the stream starts small, as in GPT-2."""
        last = _STD / (2 * len(self.blocks)) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                ends_block = name.endswith(("attention.output.weight", "ffn.down.weight"))
                is_last = ends_block or name.endswith("experts.down_weight")
                parameter.normal_(std=last if is_last else _STD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens_BT).y_BTD, self.output_weight_VD)

    @property
    def output_weight_VD(self) -> Tensor:
        """The weight of the output layer: the embedding's, if they are tied."""
        return self.embedding.weight if self.config.is_tied else self.head.weight

    def hidden(self, tokens_BT: Tensor) -> _Hidden:
        """Compute the states from which the logits follow."""
        x_BTD = self.embedding(tokens_BT)
        turn_T1d = _rotary_table(
            tokens_BT.shape[1], self.config.head_width, self.config.rope_base, x_BTD
        )
        shares: list[Tensor] = []
        keep_all = not (self.recompute and torch.is_grad_enabled())
        for block in self.blocks:
            if keep_all:
                x_BTD, share = block(x_BTD, turn_T1d)
            else:
                x_BTD, share = cast(
                    tuple[Tensor, Tensor | None],
                    checkpoint(
                        block, x_BTD, turn_T1d, use_reentrant=False, preserve_rng_state=False
                    ),
                )
            if share is not None:
                shares.append(share)
        balance, busiest = _mean_shares(shares, x_BTD)
        return _Hidden(self.final_norm(x_BTD), balance, busiest)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> _TextLoss:
        """Compute the targets' cross-entropy without ever holding all logits in memory."""
        y_BTD, balance, busiest = self.hidden(tokens_BT)
        total = _sum_cross_entropy(y_BTD.flatten(0, 1), self.output_weight_VD, targets_BT.flatten())
        return _TextLoss(total, balance, busiest)

    def compute_experts_by(self, products: ExpertProducts) -> None:
        """Make all experts compute their matrix products in this way."""
        for module in self.modules():
            if isinstance(module, ExpertFeedForward):
                module.products = products


class _DecoderBlock(nn.Module):
    """Attention, then the feed-forward network or the experts; each adds to the stream."""

    def __init__(self, config: ModelConfig, block: Block) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = _Attention(config)
        self.ffn_norm = _norm(config)
        self.ffn: _FeedForward | ExpertFeedForward
        if isinstance(block, DenseBlock):
            self.ffn = _FeedForward(config.width, block.hidden, config.activation)
        else:
            self.ffn = ExpertFeedForward(config.width, block, config.activation)

    def forward(self, x_BTD: Tensor, turn_T1d: Tensor) -> tuple[Tensor, Tensor | None]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), turn_T1d)
        y_BTD = self.ffn_norm(x_BTD)
        if isinstance(self.ffn, _FeedForward):
            return x_BTD + self.ffn(y_BTD), None
        y_ND, share_2 = self.ffn(y_BTD.flatten(0, 1))
        return x_BTD + y_ND.view_as(x_BTD), share_2


class _Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.width, config.width) for _ in range(4)
        )

    def forward(self, x_BTD: Tensor, turn_T1d: Tensor) -> Tensor:
        heads = (*x_BTD.shape[:2], self.num_heads, -1)
        q_BTHd = _rotated(self.query(x_BTD).view(heads), turn_T1d)
        k_BTHd = _rotated(self.key(x_BTD).view(heads), turn_T1d)
        v_BTHd = self.value(x_BTD).view(heads)
        y_BHTd = F.scaled_dot_product_attention(
            q_BTHd.transpose(1, 2), k_BTHd.transpose(1, 2), v_BTHd.transpose(1, 2), is_causal=True
        )
        return cast(Tensor, self.output(y_BHTd.transpose(1, 2).flatten(2)))


def _rotary_table(num_tokens: int, head_width: int, base: float, like: Tensor) -> Tensor:
    """Return cosines, then sines, of positions' angles: (T, 1, d), in `like`'s type and device.

    RoFormer (arXiv:2104.09864), but a rotated pair's numbers are half a head apart.
    """
    half = torch.arange(0, head_width, 2, dtype=torch.float64, device=like.device)
    places_T = torch.arange(num_tokens, dtype=torch.float64, device=like.device)
    angles = torch.outer(places_T, base ** (-half / head_width))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)[:, None].to(like.dtype)


def _rotated(x_BTHd: Tensor, turn_T1d: Tensor) -> Tensor:
    """Rotate each pair of numbers of each head by its position's angle."""
    if torch.compiler.is_compiling():
        # Inductor makes one kernel of the plain formula, but cannot write results in halves.
        cosine, sine = turn_T1d.to(x_BTHd.dtype).chunk(2, dim=-1)
        low, high = x_BTHd.chunk(2, dim=-1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)
    return cast(Tensor, _Rotation.apply(x_BTHd, turn_T1d.to(x_BTHd.dtype)))


class _Rotation(torch.autograd.Function):
    """The rotation with half the kernels of the plain formula; backward rotates back."""

    @staticmethod
    def forward(ctx: Any, x_BTHd: Tensor, turn_T1d: Tensor) -> Tensor:
        ctx.save_for_backward(turn_T1d)
        return _turned(x_BTHd, turn_T1d, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (turn_T1d,) = ctx.saved_tensors
        return _turned(gradient, turn_T1d, -1.0), None


def _turned(x_BTHd: Tensor, turn_T1d: Tensor, direction: float) -> Tensor:
    cosine, sine = turn_T1d.chunk(2, dim=-1)
    low, high = x_BTHd.chunk(2, dim=-1)
    y_BTHd = torch.empty_like(x_BTHd)
    y_low, y_high = y_BTHd.chunk(2, dim=-1)
    torch.mul(low, cosine, out=y_low).addcmul_(high, sine, value=-direction)
    torch.mul(high, cosine, out=y_high).addcmul_(low, sine, value=direction)
    return y_BTHd


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """Count all parameters, and those that compute one token; allocate nothing."""
    with torch.device("meta"):
        model = LanguageModel(config, initialize=False)
    total = sum(parameter.numel() for parameter in model.parameters())
    asleep = 0
    for block, module in zip(config.blocks, model.blocks, strict=True):
        if isinstance(block, ExpertBlock):
            experts = cast(ExpertFeedForward, cast(_DecoderBlock, module).ffn).experts
            each = sum(p.numel() for p in experts.parameters()) // block.num_experts
            asleep += (block.num_experts - block.top_k) * each
    return total, total - asleep


def _norm(config: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.width, eps=1e-5)


def _mean_shares(shares: list[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    if not shares:
        return like.new_zeros(()), like.new_ones(())
    balance, busiest = torch.stack(shares).mean(dim=0).unbind()
    return balance, busiest.detach()


class _FeedForward(nn.Module):
    """down(gelu(up(x))), or SwiGLU's down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden) if activation == "swiglu" else None
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        return cast(Tensor, self.down(inner))
