# SPDX-License-Identifier: Apache-2.0
"""Proves the fused block's passes back: every path gives the reference's bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from block_passes import agree, by_activation, by_shape, column, drawn, key_of, same, vectors, with_native
from byteback import ops
from byteback.ops.backends import paths
from byteback.ops.backends.reference import block, block_grad


@pytest.fixture(autouse=True)
def _threads(restore_threads: None) -> Iterator[None]:
    yield


@with_native
@by_shape
@by_activation
def test_backward_agrees(shape: tuple[int, ...], activation: str) -> None:
    for seed, with_mask in itertools.product((0, 1), (False, True)):
        g, x = drawn(shape, seed), drawn(shape, seed + 6, special=seed == 0)
        a, b, p, q, r = vectors(shape[1], 5, seed)
        pixels = g.numel() // shape[1]
        mask = block.pack_mask(drawn(shape, seed + 3) > 0) if with_mask else None
        assert mask is None or mask.shape == (pixels, -(-shape[1] // 8))
        gate = (g, x, a, b, mask, activation)
        agree(lambda gate=gate: ops.normalize_grad_sums(*gate, want_masked=False, want_squares=True))
        sums = agree(lambda gate=gate: ops.normalize_grad_sums(*gate, want_masked=True))
        assert sums.squares is None
        masked = sums.masked
        full = ops.GradientParts(*gate, p, q, r)
        dx = agree(lambda full=full: ops.normalize_grad(full))
        with paths.path("reference"):
            assert same(dx, (column(p, x) * masked + column(q, x) * x) + column(r, x))
        for clip, key in ((torch.tensor(2.5), None), (torch.tensor([2.5]), key_of(7)), (torch.tensor(0.0), key_of(1))):
            result = agree(lambda full=full, c=clip, k=key: ops.normalize_grad_quantize(full, c, k))
            assert same(result, ops.quantize(dx, clip.reshape([1] * x.dim()), key))


@with_native
@by_shape
def test_waiting_gradients_are_added(shape: tuple[int, ...]) -> None:
    x, g = drawn(shape, 1), drawn(shape, 8, special=False)
    mask = block.pack_mask(drawn(shape, 3) > 0)
    assert same(agree(lambda: ops.add_waiting(x, g, None)), x + g)
    masked = agree(lambda: ops.normalize_grad_sums(g, x, None, None, mask, "none", want_masked=True)).masked
    assert same(agree(lambda: ops.add_waiting(x, g, mask)), x + masked)


def test_waiting_gradients_of_other_shapes_are_refused() -> None:
    x, mask = torch.zeros(2, 8, 3), torch.zeros(6, 1, dtype=torch.uint8)
    assert ops.add_waiting(x, x, mask).shape == x.shape
    with pytest.raises(ValueError, match="add_waiting: x has shape"):
        ops.add_waiting(x, x[:1], mask)
    with pytest.raises(ValueError, match="add_waiting: mask has shape"):
        ops.add_waiting(x, x, mask[:5])


@with_native
def test_none_without_a_mask_needs_no_vectors() -> None:
    g, x = drawn((2, 24, 5, 5), 1), drawn((2, 24, 5, 5), 3)
    p, q, r = vectors(24, 3, 0)
    agree(lambda: ops.normalize_grad_sums(g, x, None, None, None, "none", want_masked=True))
    agree(lambda: ops.normalize_grad(ops.GradientParts(g, x, None, None, None, "none", p, q, r)))


@with_native
@by_shape
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_kept_inputs_agree(shape: tuple[int, ...], kind: str) -> None:
    for seed in (0, 1):
        x, g = drawn(shape, seed), drawn(shape, seed + 5, special=False)
        a, b, p, q, r = vectors(shape[1], 5, seed)
        clean = torch.nan_to_num(x, 0.0, 9.0, -9.0)
        one = torch.tensor(1.0)
        low, high, mean = clean.amin([0, *range(2, x.dim())]), clean.amax([0, *range(2, x.dim())]), b
        kept = agree(lambda x=x, s=(low, high, mean): ops.pack_norm(x, *s, kind))
        args = (x, a, b, None, "relu", torch.tensor(1.0))
        result = agree(
            lambda args=args, s=(low, high, mean): ops.normalize(
                *args, want_float=True, want_mask=True, keep=kind, low=s[0], high=s[1], mean=s[2]
            )
        )
        assert same(result.kept, kept)
        as_floats = block_grad.kept_value(kept)
        for activation, mask in (("none", None), ("relu", result.mask), ("relu6", None), ("silu", None), ("gelu", None)):
            gate = (a, b, mask, activation)
            wants = {"want_masked": True, "want_squares": True}
            sums = agree(lambda g=g, kept=kept, gate=gate, w=wants: ops.normalize_grad_sums(g, kept, *gate, **w))
            assert same(sums, ops.normalize_grad_sums(g, as_floats, *gate, **wants))
            full = ops.GradientParts(g, kept, *gate, p, q, r)
            dx = ops.normalize_grad(ops.GradientParts(g, as_floats, *gate, p, q, r))
            assert same(agree(lambda full=full: ops.normalize_grad(full)), dx)
            quantized = agree(lambda full=full: ops.normalize_grad_quantize(full, torch.tensor(2.0), key_of(9)))
            assert same(quantized, ops.quantize(dx, torch.full([1] * x.dim(), 2.0), key_of(9)))
            each = a.abs()
            tails = agree(lambda parts=full, each=each, one=one: ops.normalize_grad_tails(parts, each, one))
            assert same(tails, (ops.absmax(dx, 1), *ops.tail_count_pair(dx, each, one)))
            both = (torch.tensor(2.0), column(each + 0.1, x), key_of(9))
            pair = agree(lambda parts=full, both=both: ops.normalize_grad_quantize_pair(parts, *both))
            assert same(pair, ops.quantize_pair(dx, *both))
