# SPDX-License-Identifier: Apache-2.0
"""The passes of a fused block and max-pooling in Triton's interpreter: equal to the reference, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from byteback.ops.activations import ACTIVATIONS
from byteback.ops.backends import reference, triton
from byteback.ops.contract.bfloat16 import to_bfloat16
from byteback.ops.contract.layout import channels_last
from byteback.ops.types import BatchNorm, GradientParts, ProductCall, QTensor, Wants, Window
from same_bits import assert_same_bits, drawn, integers

SHAPE = (3, 11, 5, 4)
BF16 = Wants(False, False, False, None, torch.bfloat16)
KEY = torch.tensor([123456789, 987654321])


def norm(bias: bool) -> BatchNorm:
    draw, c = torch.Generator().manual_seed(1), SHAPE[1]
    gamma, beta, shift = (torch.randn(c, generator=draw) for _ in range(3))
    return BatchNorm(gamma, beta, shift if bias else None, 1e-5, (torch.zeros(c), torch.ones(c)), 0.1)


def residual(kind: str, draw: torch.Generator) -> Tensor | QTensor | None:
    if kind == "int8":
        values = integers(SHAPE, draw).contiguous(memory_format=torch.channels_last)
        return QTensor(values, torch.tensor([0.01]))
    return drawn(SHAPE, draw) if kind == "float" else None


@pytest.mark.parametrize(
    ("activation", "added", "keep"),
    [
        pytest.param("none", "int8", None, marks=pytest.mark.slow),
        ("relu", "float", "int8"),
        pytest.param("relu", "no", "bfloat16", marks=pytest.mark.slow),
        ("relu6", "no", None),
        pytest.param("silu", "no", "int8", marks=pytest.mark.slow),
        *(pytest.param(name, "float", None, marks=pytest.mark.slow) for name in ("hardswish", "silu", "gelu")),
        pytest.param("gelu", "no", "bfloat16", marks=pytest.mark.slow),
        pytest.param("hardswish", "no", "int8", marks=pytest.mark.slow),
    ],
)
def test_the_passes_of_a_block_equal_the_reference(activation: str, added: str, keep: str | None) -> None:
    draw = torch.Generator().manual_seed(0)
    x, g, plus = drawn(SHAPE, draw), drawn(SHAPE, draw), residual(added, draw)
    own, other, wants = norm(keep is None), norm(keep is None), Wants(True, True, True, keep)
    expected = reference.normalize_batch(x, other, plus, activation, wants)
    assert_same_bits(triton.normalize_batch(x, own, plus, activation, wants), expected)
    assert_same_bits(own.running, other.running)

    state, kept = expected.norm, x if expected.kept is None else expected.kept
    assert state is not None
    for mask in (expected.mask, None) if plus is None else (expected.mask,):
        arguments = (g, kept, state.a, state.b, mask, activation, state.mean, state.invstd, 1e-5, True, True)
        gradient = reference.normalize_grad_batch(*arguments)
        assert_same_bits(triton.normalize_grad_batch(*arguments), gradient)
        parts = GradientParts(g, kept, state.a, state.b, mask, activation, state.a, gradient.q, gradient.r)
        assert_same_bits(triton.normalize_grad(parts), reference.normalize_grad(parts))
        peak = reference.absmax(reference.normalize_grad(parts), 1)
        for name, rest in (
            ("normalize_grad_quantize", (peak.amax() * 0.5, KEY)),
            ("normalize_grad_quantize_pair", (peak.amax() * 0.5, peak * 0.7, KEY)),
            ("normalize_grad_quantize_by_ratio", (0.6, None)),
            ("normalize_grad_tails", (peak.reshape(-1) * 0.5, peak.amax() * 0.3)),
        ):
            assert_same_bits(getattr(triton, name)(parts, *rest), getattr(reference, name)(parts, *rest))


@pytest.mark.parametrize("window", [Window((3, 3), (2, 2), (1, 1), (1, 1)), Window((2, 3), (1, 2), (0, 1), (2, 1), True)])
def test_max_pool_equals_the_reference(window: Window) -> None:
    draw = torch.Generator().manual_seed(0)
    x = drawn((2, 7, 9, 8), draw, bad=True)
    expected = reference.max_pool(x, window)
    assert_same_bits(triton.max_pool(x, window), expected)
    g = drawn(tuple(expected[0].shape), draw)
    found = triton.max_pool_grad(g, expected[1], x.shape, window)
    assert_same_bits(found, reference.max_pool_grad(g, expected[1], x.shape, window))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_equal_the_reference(activation: str) -> None:
    """From subnormal numbers to infinity, with NaN."""
    sizes = torch.cat(
        [torch.linspace(0, 14, 200), torch.logspace(-45, 38, 300), torch.tensor([3.0, 6.0, 12.0, 87.0, 88.4, 89.0])]
    )
    z = torch.cat([sizes, -sizes, torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])]).reshape(1, 1, -1, 1)
    one, zero = torch.ones(1), torch.zeros(1)
    found = triton.normalize(z, one, zero, None, activation, None, True, False, None, None, None)
    assert_same_bits(
        found.output, reference.normalize(z, one, zero, None, activation, None, True, False, None, None, None).output
    )
    parts = GradientParts(torch.full_like(z, 1.5), z, one, zero, None, activation, one, zero, zero)
    assert_same_bits(triton.normalize_grad(parts), reference.normalize_grad(parts))


@pytest.mark.parametrize(
    ("activation", "added"),
    [("relu", "float"), *(pytest.param(name, "no", marks=pytest.mark.slow) for name in ("none", "gelu"))],
)
def test_the_passes_read_and_write_bfloat16(activation: str, added: str) -> None:
    """With NaN and with floats that round to Inf."""
    draw = torch.Generator().manual_seed(0)
    floats, g, plus = drawn(SHAPE, draw), to_bfloat16(drawn(SHAPE, draw)), residual(added, draw)
    floats[0, 0, 0, :2], plus = torch.tensor([3.4e38, -1e-41]), None if plus is None else to_bfloat16(plus)
    assert_same_bits(triton.pack_norm(floats, "bfloat16", None), reference.pack_norm(floats, "bfloat16", None))
    x = to_bfloat16(drawn(SHAPE, draw))
    own, other, wants = norm(True), norm(True), Wants(True, True, True, "int8", torch.bfloat16, torch.bfloat16)
    expected = reference.normalize_batch(x, other, plus, activation, wants)
    assert_same_bits(triton.normalize_batch(x, own, plus, activation, wants), expected)
    state, kept = expected.norm, expected.kept
    assert state is not None and kept is not None and expected.output is not None
    arguments = (g, kept, state.a, state.b, expected.mask, activation, state.mean, state.invstd, 1e-5, True, True)
    gradient = reference.normalize_grad_batch(*arguments)
    assert_same_bits(triton.normalize_grad_batch(*arguments), gradient)
    parts = GradientParts(g, kept, state.a, state.b, expected.mask, activation, state.a, gradient.q, gradient.r)
    peak = reference.absmax(reference.normalize_grad(parts), 1)
    found = triton.normalize_grad_quantize_pair(parts, peak.amax() * 0.5, peak * 0.7, KEY)
    assert_same_bits(found, reference.normalize_grad_quantize_pair(parts, peak.amax() * 0.5, peak * 0.7, KEY))
    assert_same_bits(triton.add_waiting(floats, g, expected.mask), reference.add_waiting(floats, g, expected.mask))


@pytest.mark.parametrize("bad", [False, True])
def test_a_product_is_rounded_when_it_is_written(bad: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, w = (channels_last(integers(size, draw)) for size in ((2, 11, 3, 4), (7, 11, 1, 1)))
    one = torch.full((1, 1, 1, 1), float("nan") if bad else 0.37)
    call = ProductCall("output", (2, 7, 3, 4), (84, 1, 28, 7), x, w, ((1, 1), (0, 0), (1, 1), 1), True)
    call.plan = triton.product_plan(call, x, w)
    found = triton.conv_normalize_batch(call, (x, one, w, one), BatchNorm(None, None, None, 0.1, None, 0.1), None, "none", BF16)
    call.plan = reference.product_plan(call, x, w)
    expected = to_bfloat16(reference.product(call, x, one, w, one))
    assert_same_bits(found[0], expected)


def test_waiting_gradients_are_added_as_on_the_reference() -> None:
    draw = torch.Generator().manual_seed(0)
    x, g = drawn(SHAPE, draw), drawn(SHAPE, draw)
    mask = torch.randint(0, 256, (SHAPE[0] * SHAPE[2] * SHAPE[3], 2), generator=draw).to(torch.uint8)
    for bits in (mask, None):
        assert_same_bits(triton.add_waiting(x, g, bits), reference.add_waiting(x, g, bits))
