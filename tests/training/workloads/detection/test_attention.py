"""Every implementation of deformable attention computes its definition, and its gradients.

The Triton kernel takes the same tests where Triton interprets kernels: test_attention_kernel.py.
"""

import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.training.forked import in_fork
from tests.training.workloads.detection.scalar_attention import scalar_attention
from training.workloads.detection.attention import Implementation, deformable_attention

SHAPES = [(6, 4), (3, 2)]
HERE: list[Implementation] = (
    ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["reference", "deterministic"]
)
IS_INTERPRETED = HERE == ["triton"]
BIT_FOR_BIT: list[Implementation] = ["triton", "deterministic"]
here = pytest.mark.parametrize("implementation", HERE)


def case(
    *, batch: int = 1, heads: int = 2, width: int = 2, queries: int = 2, points: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Upstream's test (ops/test.py): value, locations and weights in float64, seed 3."""
    rng = torch.Generator().manual_seed(3)
    tokens, levels = sum(h * w for h, w in SHAPES), len(SHAPES)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    value = uniform(batch, tokens, heads, width) * 0.01
    locations = uniform(batch, queries, heads, levels, points, 2)
    weights = uniform(batch, queries, heads, levels, points) + 1e-5
    return value, locations, weights / weights.sum(dim=(-1, -2), keepdim=True)


def step(implementation: Implementation, given: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of the three inputs."""
    value, locations, weights = (each.detach().clone().requires_grad_() for each in given)
    out = deformable_attention(value, SHAPES, locations, weights, implementation)
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, (value, locations, weights), dout)]


@here
def test_it_is_the_definition_inside_at_the_border_and_outside(
    implementation: Implementation,
) -> None:
    value, locations, weights = case(batch=2, queries=5, width=3, points=3)
    # Borders, corners, pixel centres, just outside and far away.
    special = [(0, 0), (1, 1), (0, 0.5), (1, 0.25), (-0.1, 0.5), (1.1, 1.1), (-3, 2), (0.125, 0.75)]
    locations.view(-1, 2)[: 2 * len(special) : 2] = torch.tensor(special, dtype=torch.float64)
    found = deformable_attention(value, SHAPES, locations, weights, implementation)
    expected = scalar_attention(value, SHAPES, locations, weights)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-16)


@here
def test_in_float32_it_is_the_definition_but_for_rounding(implementation: Implementation) -> None:
    given = case(batch=2, queries=5, width=3, points=3)
    found = deformable_attention(
        given[0].float(), SHAPES, given[1].float(), given[2].float(), implementation
    )
    expected = scalar_attention(given[0], SHAPES, given[1], given[2])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-9)


@here
# Upstream's widths of a head.
@pytest.mark.parametrize("width", [2] if IS_INTERPRETED else [2, 30, 64, 71, 1025])
def test_its_gradients_are_those_of_small_differences(
    implementation: Implementation, width: int
) -> None:
    given = tuple(each.requires_grad_() for each in case(width=width))

    def attend(*inputs: Tensor) -> Tensor:
        value, locations, weights = inputs
        return deformable_attention(value, SHAPES, locations, weights, implementation)

    assert torch.autograd.gradcheck(attend, given, fast_mode=IS_INTERPRETED or width > 2)


@here
def test_a_point_outside_or_nowhere_reads_nothing_and_disturbs_nobody(
    implementation: Implementation,
) -> None:
    value, locations, weights = case(queries=3)
    outside, nan, infinite = locations.clone(), locations.clone(), locations.clone()
    for moved, to in ((outside, 1.5), (nan, float("nan")), (infinite, float("-inf"))):
        moved[0, 1, 0, 1, 1] = to
    expected = step(implementation, (value, outside, weights))
    assert not expected[2][0, 1, 0, 1, 1].any() and not expected[3][0, 1, 0, 1, 1]
    # torch's own sampling makes NaN of it.
    for moved in () if implementation == "reference" else (nan, infinite):
        for one, other in zip(step(implementation, (value, moved, weights)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@here
def test_under_autocast_it_is_computed_in_float32(implementation: Implementation) -> None:
    value, locations, weights = (each.float() for each in case(queries=4, width=8))
    low = value.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step(implementation, (low, locations, weights))
    expected = step(implementation, (low.float(), locations, weights))
    assert [each.dtype for each in found] == [torch.bfloat16] * 2 + [torch.float32] * 2
    # Triton truncates where it interprets, and rounds on a GPU.
    torch.testing.assert_close(found[0].float(), expected[0], rtol=2**-7, atol=0)
    # The gradient comes in bfloat16 as well.
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.02, atol=0.02 * float(other.max()))


@here
def test_nothing_is_kept_for_backward_but_the_inputs(implementation: Implementation) -> None:
    if implementation == "reference":
        pytest.skip("keeps what it sampled")
    given = [each.requires_grad_() for each in case(queries=50, points=4)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        deformable_attention(given[0], SHAPES, given[1], given[2], implementation)
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in given}


def test_bits_depend_neither_on_threads_nor_on_the_order_of_work() -> None:
    given = [each.float() for each in case(batch=2, queries=64, width=16, points=4)]
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        torch.set_num_threads(1)
        alone = step("deterministic", given)
        torch.set_num_threads(2)
        together = step("deterministic", given)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not IS_INTERPRETED, reason="the kernel's")
# What a NaN becomes as an integer does not count.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_the_bits_of_a_deterministic_kernel_do_not_depend_on_the_order_of_the_queries() -> None:
    value, locations, weights = (each.float() for each in case(queries=9, width=3))
    order = torch.arange(9).flip(0)
    there = [value, locations, weights]
    back = [value, locations[:, order], weights[:, order]]

    def gradient(given: list[Tensor]) -> Tensor:
        inputs = [each.detach().clone().requires_grad_() for each in given]
        out_BQD = deformable_attention(inputs[0], SHAPES, inputs[1], inputs[2], "triton")
        dout_BQD = torch.linspace(-1, 1, 9)[:, None].expand_as(out_BQD)
        dout_BQD = dout_BQD if given is there else dout_BQD[:, order]
        return torch.autograd.grad(out_BQD, inputs[0], dout_BQD)[0]

    assert not torch.equal(gradient(there), gradient(back)), "else nothing is shown"
    expected = gradient(there)
    torch.use_deterministic_algorithms(True)
    found = gradient(there)
    assert torch.equal(found, gradient(back))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(found.abs().max()))
    there[2][0, 7, 0, 0, 0] = torch.nan
    assert gradient(there).isnan().all(), "a state that diverged is seen"


@here
def test_its_footprint_is_measured_without_data(implementation: Implementation) -> None:
    if implementation == "triton":
        pytest.skip("a kernel needs values")

    def shapes() -> list[torch.Size]:
        with FakeTensorMode():
            return [each.shape for each in step(implementation, case(batch=2, queries=5))]

    assert in_fork(shapes) == [
        each.shape for each in step(implementation, case(batch=2, queries=5))
    ]


@pytest.mark.gpu
def test_on_a_gpu_all_are_the_same_and_two_bit_for_bit() -> None:
    given = [each.float().cuda() for each in case(batch=2, queries=999, width=32, points=4)]

    def on_gpu(implementation: Implementation) -> list[Tensor]:
        inputs = [each.detach().clone().requires_grad_() for each in given]
        out = deformable_attention(inputs[0], SHAPES, inputs[1], inputs[2], implementation)
        return [out, *torch.autograd.grad(out, inputs, out.detach())]

    expected = on_gpu("reference")
    for implementation in BIT_FOR_BIT:
        for one, other in zip(on_gpu(implementation), expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-3, atol=1e-4 * float(other.detach().abs().max())
            )
    torch.use_deterministic_algorithms(True)
    try:
        for implementation in BIT_FOR_BIT:
            for one, other in zip(on_gpu(implementation), on_gpu(implementation), strict=True):
                assert torch.equal(one, other)
    finally:
        torch.use_deterministic_algorithms(False)
