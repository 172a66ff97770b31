"""What ranks add up in a step: gradients, while backward goes on, and BatchNorm's statistics."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from training.attempt.world import World
from training.engine.reduction import BucketLayout, Reduction, add, buckets
from training.errors import RunFailedError
from training.workload import Train


class Gradients:
    """The gradients of a rank's whole model, on their way to all other ranks.

    Buckets are sent in one order, each as soon as backward has made the gradients of it and of
    those before it. A parameter without a gradient on one rank adds nothing there.
    """

    def __init__(self, stage: Train, parameters: Sequence[Tensor], world: World) -> None:
        self._stage = stage
        self._world = world
        self._parameters = parameters
        self._buckets = buckets(parameters)
        self._layouts = [BucketLayout([parameters[n] for n in bucket]) for bucket in self._buckets]
        self.reduction = Reduction(world, is_ring=stage.settings.reduction == "ring")
        self._aside: Sequence[Sequence[Tensor | None]] | None = None  # while backward may send
        self._waited_for: list[set[int]] = []  # by bucket: parameters without a gradient so far
        self._num_sent = 0
        self._has_own = [False] * len(parameters)
        self._buffers: list[tuple[int, int]] = []
        # Weak: a parameter that held this would hold the whole stage after its end.
        ready = weakref.WeakMethod(self._ready)
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, number=number: (act := ready()) and act(number)
            )
        self._bucket_of = {n: k for k, bucket in enumerate(self._buckets) for n in bucket}

    def begin_step(self, model: nn.Module) -> None:
        """Nothing is sent yet."""
        self._num_sent = 0
        self._buffers = _versions(model)

    @contextlib.contextmanager
    def sending(self, aside: Sequence[Sequence[Tensor | None]]) -> Iterator[None]:
        """Send buckets in here, in the last backward; sums that were set aside are added first."""
        self._waited_for = [set(bucket) for bucket in self._buckets]
        self._aside = aside
        try:
            yield
        finally:
            self._aside = None

    def send_rest(self, aside: Sequence[Sequence[Tensor | None]]) -> None:
        """Send what backward has not: a rank may have had none, or left parameters out."""
        while self._num_sent < len(self._buckets):
            self._send(aside)

    def end_step(self, model: nn.Module) -> None:
        """Leave the sums in `grad`, and None where no rank has a gradient."""
        has_any = self._world.any_of(self._has_own)
        self.reduction.end()
        for parameter, is_there in zip(self._parameters, has_any, strict=True):
            if not is_there:
                parameter.grad = None
        if _versions(model) != self._buffers:
            raise RunFailedError(
                f"stage {self._stage.name!r}: its forward changes a buffer that is none of "
                "BatchNorm's statistics, which ranks cannot add up; train it with --num-processes 1"
            )

    def _ready(self, number: int) -> None:
        """A gradient is there, after each backward."""
        if self._aside is None:
            return
        if self._bucket_of[number] < self._num_sent:
            raise RunFailedError(
                f"stage {self._stage.name!r}: one backward made a gradient twice, after ranks had "
                "begun to add it up; give torch.utils.checkpoint use_reentrant=False"
            )
        self._waited_for[self._bucket_of[number]].discard(number)
        while self._num_sent < len(self._buckets) and not self._waited_for[self._num_sent]:
            self._send(self._aside)

    def _send(self, aside: Sequence[Sequence[Tensor | None]]) -> None:
        bucket = self._buckets[self._num_sent]
        parameters = [self._parameters[number] for number in bucket]
        sums = [parameter.grad for parameter in parameters]
        for earlier in reversed(aside):
            sums = add([earlier[number] for number in bucket], sums)
        for number, parameter, own in zip(bucket, parameters, sums, strict=True):
            self._has_own[number] = own is not None
            if own is not None and own.layout != torch.strided:
                raise RunFailedError(
                    f"stage {self._stage.name!r}: a gradient of shape {tuple(parameter.shape)} is "
                    "sparse, which ranks do not add up; give nn.Embedding sparse=False"
                )
        summed = self.reduction.begin(self._layouts[self._num_sent], sums)
        for parameter, gradient in zip(parameters, summed, strict=True):
            parameter.grad = gradient
        self._num_sent += 1


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """What changes when a buffer is replaced, or changed in place by anything but BatchNorm."""
    norms = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers(False)}
    return [(id(b), b._version) for b in model.buffers() if id(b) not in norms]


class NormStatistics:
    """The running statistics of a model's BatchNorm, as sums over the micro-batches of a step."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [
            module
            for module in model.modules()
            if isinstance(module, _NormBase) and module.running_mean is not None
        ]
        self._tensors: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._before: list[Tensor] = []
        self._counts_before: list[Tensor] = []
        self._sums: list[Tensor | None] = []
        self._aside: list[list[Tensor | None]] = []
        self._reduced: list[Tensor] = []

    def begin(self, *, is_alone: bool) -> None:
        """Before a step; where its only micro-batch `is_alone`, that leaves what it leaves."""
        norms = [] if is_alone else [norm for norm in self._norms if norm.training]
        named = [dict(norm.named_buffers(recurse=False)) for norm in norms]
        self._tensors = [own[name] for own in named for name in ("running_mean", "running_var")]
        self._counts = [own["num_batches_tracked"] for own in named if "num_batches_tracked" in own]
        self._before = [tensor.clone() for tensor in self._tensors]
        self._counts_before = [count.clone() for count in self._counts]
        self._sums = [None] * len(self._tensors)

    def set_aside(self) -> None:
        """Begin a sum of its own."""
        self._aside.append(self._sums)
        self._sums = [None] * len(self._tensors)

    def add(self, joins: int) -> None:
        """After a micro-batch: add what it has made of the statistics, and take that back."""
        if not self._tensors:
            self._aside.clear()
            return
        self._sums = add(self._sums, [tensor.clone() for tensor in self._tensors])
        self._take_back()
        for _ in range(joins):
            self._sums = add(self._aside.pop(), self._sums)

    def begin_reduction(self, reduction: Reduction) -> None:
        """Add the ranks' sums up, bucket by bucket."""
        self._reduced = self._tensors[:]
        for bucket in buckets(self._tensors):
            layout = BucketLayout([self._tensors[number] for number in bucket])
            parts = reduction.begin(layout, [self._sums[number] for number in bucket])
            for number, part in zip(bucket, parts, strict=True):
                self._reduced[number] = part
        self._sums = list(self._reduced)

    def end(self, num_micro_batches: int) -> None:
        """Leave the mean over all micro-batches of the step."""
        sums = [tensor for tensor in self._sums if tensor is not None]
        if sums:
            torch._foreach_div_(sums, float(num_micro_batches))
            torch._foreach_copy_(self._tensors, sums)
            for count, before in zip(self._counts, self._counts_before, strict=True):
                torch.add(before, 1, out=count)

    def _take_back(self) -> None:
        now, before = [*self._tensors, *self._counts], [*self._before, *self._counts_before]
        torch._foreach_copy_(now, before)
