# SPDX-License-Identifier: Apache-2.0
"""normalize_batch: one call gives the bits of the steps that it stands for, on every path and with any number of threads."""

from __future__ import annotations

import pytest
import torch

from byteback import ops
from byteback.ops import BatchNorm, normalize_batch, normalize_grad_batch
from byteback.ops.backends import paths

PATHS = [path for path in paths.available() if path != "reference"]
SHAPES = [(3, 16, 8, 8), (2, 7, 5, 3), (2, 24, 9), (5, 40), (2, 8, 3, 4, 5), (1, 130, 17, 3)]


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def drawn(shape, seed=0):
    torch.manual_seed(seed)
    x = channels_last(torch.randn(shape) * 3 + 1)
    channels = shape[1]
    vectors = [torch.randn(channels) for _ in range(4)] + [torch.rand(channels) + 0.5]
    return x, vectors


def equal(one, other):
    if one is None or other is None:
        assert one is other
    elif isinstance(one, tuple):
        for first, second in zip(one, other, strict=True):
            equal(first, second)
    else:
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def residual_of(kind, shape):
    if kind is None:
        return None
    if kind == "float":
        return channels_last(torch.randn(shape))
    return channels_last(torch.randint(-127, 128, shape, dtype=torch.int8)), torch.tensor([[0.03]])


def forward(path, shape, kind, activation, wants, bias=True, running=True, keep=None):
    x, (gamma, beta, conv_bias, mean, var) = drawn(shape)
    norm = BatchNorm(gamma, beta, conv_bias if bias else None, 1e-5, (mean, var) if running else None, 0.1)
    residual = residual_of(kind, shape)
    with paths.path(path):
        int8, floats, mask = wants
        made = normalize_batch(x, norm, residual, activation, want_int8=int8, want_float=floats, want_mask=mask, keep=keep)
    kept = made.kept if isinstance(made.kept, tuple) else (made.kept,)
    return (*made.norm, *(made.q or (None,) * 3)[:3], *made[1:3], mean, var, *kept)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [None, "float", "int8"])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_forward_is_that_of_the_reference(path, shape, kind, activation):
    for wants in [(True, True, True), (True, False, False), (False, True, True), (False, False, False)]:
        for one, other in zip(
            forward(path, shape, kind, activation, wants), forward("reference", shape, kind, activation, wants), strict=True
        ):
            equal(one, other)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", ["bfloat16", "int8"])
def test_x_is_kept_as_the_reference_keeps_it(path, shape, keep):
    for wants in [(True, True, True), (True, False, True), (False, False, False)]:
        ours, plain = (forward(way, shape, None, "relu", wants, keep=keep) for way in (path, "reference"))
        assert len(ours) == (15 if keep == "int8" else 13)
        for one, other in zip(ours, plain, strict=True):
            equal(one, other)


@pytest.mark.parametrize("path", PATHS)
def test_x_is_kept_as_pack_norm_keeps_it(path):
    x, (gamma, beta, *_) = drawn((4, 16, 6, 6))
    x[:, 3] = 2.5  # a channel without any spread
    norm = BatchNorm(gamma, beta, None, 1e-5, None, 0.1)
    with paths.path(path):
        made = normalize_batch(x, norm, None, "relu", want_int8=True, want_float=False, want_mask=True, keep="int8")
        _, _, low, high = ops.channel_stats(x)
        for one, other in zip(made.kept, ops.pack_norm(x, low, high, made.norm.mean, "int8"), strict=True):
            equal(one, other)
    with pytest.raises(ValueError, match="keep is 'int4', but must be"):
        normalize_batch(x, norm, None, "relu", want_int8=True, want_float=False, want_mask=True, keep="int4")


@pytest.mark.parametrize("path", PATHS)
def test_forward_is_that_of_the_steps(path):
    x, (gamma, beta, bias, mean, var) = drawn((4, 16, 6, 6))
    residual = torch.randn_like(x)
    with paths.path(path):
        norm = BatchNorm(gamma, beta, bias, 1e-3, (mean.clone(), var.clone()), 0.2)
        made = normalize_batch(x, norm, residual, "relu", want_int8=True, want_float=True, want_mask=True)
        a, b, *_ = ops.norm_coefficients(ops.channel_stats(x), 144, gamma, beta, bias, 1e-3, (mean, var), 0.2, "relu")
        peak = ops.normalize_peak(x, a, b, residual, "relu")
        steps = ops.normalize(x, a, b, residual, "relu", peak, want_float=True, want_mask=True)
    for one, other in [
        (made.norm.a, a),
        (made.norm.b, b),
        (made.norm.peak, peak),
        (norm.running[0], mean),
        (norm.running[1], var),
    ]:
        equal(one, other)
    for one, other in zip((*made.q[:3], *made[1:3]), (*steps.q[:3], *steps[1:3]), strict=True):
        equal(one, other)


@pytest.mark.parametrize("path", PATHS)
def test_a_tensor_that_lies_otherwise_and_a_norm_without_parameters(path):
    x = torch.randn(2, 12, 5, 5)  # channels first
    bare = BatchNorm(None, None, None, 1e-5, None, 0.1)
    with paths.path(path):
        results = [
            normalize_batch(t, bare, None, "relu6", want_int8=True, want_float=True, want_mask=True)
            for t in (x, channels_last(x))
        ]
    for one, other in zip(results[0][:5], results[1][:5], strict=True):
        equal(one, other)
    equal(results[0].norm.peak, results[1].norm.peak)


@pytest.mark.parametrize("path", PATHS)
def test_nan_and_inf_are_counted(path):
    x, _ = drawn((2, 16, 4, 4))
    x[0, 3, 1, 1], x[1, 5, 0, 0] = float("nan"), float("inf")
    bare = BatchNorm(None, None, None, 1e-5, None, 0.1)
    wants = dict(want_int8=True, want_float=True, want_mask=True)
    with paths.path(path):
        made = normalize_batch(x, bare, None, "relu", **wants)
    with paths.path("reference"):
        plain = normalize_batch(x, bare, None, "relu", **wants)
    equal(made.q.counts, plain.q.counts)
    equal(made.q.values, plain.q.values)
    assert made.norm.peak.isnan() and plain.norm.peak.isnan()


def backward(path, shape, activation, masked, keep):
    x, (a, b, _, _, _) = drawn(shape)
    g = channels_last(torch.randn(shape))
    mean, invstd = torch.randn(shape[1], dtype=torch.float64), torch.rand(shape[1], dtype=torch.float64) + 0.5
    with paths.path(path):
        _, _, low, high = ops.channel_stats(x)
        kept = x if keep == "float32" else ops.pack_norm(x, low, high, x.mean([0, *range(2, x.dim())]), keep)
        return normalize_grad_batch(g, kept, a, b, None, activation, mean, invstd, 1e-5, want_masked=masked, want_sums=masked)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("activation", ["none", "relu", "hardswish"])
def test_backward_is_that_of_the_reference(path, shape, keep, activation):
    for masked in (False, True):
        for one, other in zip(
            backward(path, shape, activation, masked, keep), backward("reference", shape, activation, masked, keep), strict=True
        ):
            equal(one, other)


@pytest.mark.parametrize("path", PATHS)
def test_backward_by_a_mask(path):
    x, (a, b, _, _, _) = drawn((2, 24, 5, 5))
    g, mean, invstd = torch.randn_like(x), torch.randn(24).double(), torch.rand(24).double() + 0.5
    with paths.path(path):
        mask = ops.normalize(x, a, b, None, "relu", None, want_float=False, want_mask=True).mask
        by_mask = normalize_grad_batch(g, x, a, b, mask, "relu", mean, invstd, 1e-5, want_masked=True, want_sums=True)
        by_value = normalize_grad_batch(g, x, a, b, None, "relu", mean, invstd, 1e-5, want_masked=True, want_sums=True)
    for one, other in zip(by_mask, by_value, strict=True):
        equal(one, other)


def test_threads_change_no_bit():
    x, (gamma, beta, _, _, _) = drawn((8, 32, 32, 32))
    norm = BatchNorm(gamma, beta, None, 1e-5, None, 0.1)
    results, threads = [], torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(normalize_batch(x, norm, None, "relu", want_int8=True, want_float=True, want_mask=True))
    torch.set_num_threads(threads)
    for other in results[1:]:
        for one, two in zip((*results[0].norm, *results[0][:5]), (*other.norm, *other[:5]), strict=True):
            equal(one, two)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("which", range(4))
def test_vectors_of_another_length_are_refused(path, which):
    x, _ = drawn((2, 8, 3, 3))
    vectors = [torch.ones(8) for _ in range(4)]
    vectors[which] = torch.ones(3)
    norm = BatchNorm(vectors[0], vectors[1], None, 1e-3, (vectors[2], vectors[3]), 0.2)
    with paths.path(path), pytest.raises(ValueError, match=r"has shape \(3,\), but there are 8 channels"):
        normalize_batch(x, norm, None, "relu", want_int8=True, want_float=False, want_mask=False)
