# SPDX-License-Identifier: Apache-2.0
"""What reaches a kernel: a tensor in any legal layout gives the result of its dense copy, a wrong one is refused.

A kernel gets an address and reads dense memory from it. Without these checks a strided vector is misread, an expanded one
is read past its end, and float64 is taken for float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from byteback import ops
from byteback.ops.backends import paths
from operator_calls import CALLS, CHANNELS, ONE, WRITTEN, called

# What is checked before a native path is the same for all of them.
PATHS = pytest.mark.parametrize("path", ["reference", paths.available()[0]])
EACH = pytest.mark.parametrize("name", list(CALLS))


def strided(x: Tensor) -> Tensor:
    """The same numbers, each followed by another one."""
    spread = torch.full((*x.shape, 3), 77).to(x.dtype)
    spread[..., 0] = x
    return spread[..., 0]


@PATHS
@EACH
def test_a_strided_tensor_counts_as_its_dense_copy(name: str, path: str) -> None:
    with paths.path(path):
        dense = called(name)
        for which in range(len(CALLS[name][1])):
            for _ in range(3):  # what was freed too early is not overwritten each time
                assert called(name, which, strided) == dense, which


@PATHS
@EACH
def test_an_expanded_tensor_counts_as_its_dense_copy(name: str, path: str) -> None:
    def expanded(tensor: Tensor) -> Tensor:
        return tensor.flatten()[0].clone().reshape((1,) * tensor.dim()).expand(tensor.shape)

    with paths.path(path):
        for which in range(len(CALLS[name][1])):
            if (name, which) not in WRITTEN:
                assert called(name, which, expanded) == called(name, which, lambda t: expanded(t).clone()), which


@PATHS
@EACH
def test_another_dtype_is_refused(name: str, path: str) -> None:
    other = {torch.float32: torch.float64, torch.float64: torch.float32, torch.int8: torch.int16, torch.uint8: torch.int8}
    for which, tensor in enumerate(CALLS[name][1]):
        dtype = other.get(tensor.dtype, torch.int32)
        if (name, which) == ("normalize", 8) or (name, which) == ("pack_norm", 3):
            continue  # the mean is rounded to float32, whatever it comes as
        words = f"{dtype}.*(float32|float64|int8|int64|uint8)"
        with paths.path(path), pytest.raises((TypeError, ValueError), match=words):
            called(name, which, lambda t, dtype=dtype: t.to(dtype))  # type: ignore[misc]


@PATHS
@EACH
@pytest.mark.parametrize("length", [1, CHANNELS - 1, CHANNELS + 1])
def test_a_vector_of_another_length_is_refused(name: str, length: int, path: str) -> None:
    for which, tensor in enumerate(CALLS[name][1]):
        if tensor.shape == (CHANNELS,) and name != "cosine_terms":  # which takes any number of clips
            with paths.path(path), pytest.raises(ValueError, match=rf"\({length},\)"):
                called(name, which, lambda t: t.new_ones(length))


@PATHS
def test_a_noise_key_in_any_layout_gives_the_same_integers(path: str) -> None:
    """A third of the integers was wrong, others at each call: the dense copy of the key was freed before it was read."""
    x, words = torch.randn(4, 64, 32, 32), torch.tensor([123456789, 5, 987654321, 7])
    with paths.path(path):
        expected = ops.quantize(x, 3 * ONE, words[::2].clone())[0]
        for _ in range(5):
            assert torch.equal(ops.quantize(x, 3 * ONE, words[::2])[0], expected)


@PATHS
@EACH
def test_a_tensor_whose_sign_is_a_bit_is_read_with_it(name: str, path: str) -> None:
    """x.conj().imag is -x without a copy: its memory holds x."""
    with paths.path(path):
        for which, tensor in enumerate(CALLS[name][1]):
            negative_maximum = (name, which) == ("magnitude_clips", 1)
            if tensor.is_floating_point() and (name, which) not in WRITTEN and not negative_maximum:
                assert str(called(name, which, torch._neg_view)) == str(called(name, which, torch.neg)), which
