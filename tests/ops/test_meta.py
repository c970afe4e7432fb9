# SPDX-License-Identifier: Apache-2.0
"""The meta backend: on device="meta" every function gives the shapes, dtypes and strides of the real one, and no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from byteback.ops import Into, conv_normalize, normalize, pooling
from byteback.ops.types import Window
from operator_calls import CALLS, FLAT, ONE, SINGLE, Q, W, X, vector

OWN_STATE = {"magnitude_clips", "gradient_pair"}  # they answer with Python numbers


def described(made: Any) -> list[Any]:
    """Shape, dtype and strides of every tensor; strides of axes of size 1 mean nothing."""
    if isinstance(made, (tuple, list)):
        return [part for each in made for part in described(each)]
    if not isinstance(made, Tensor):
        return [made]
    strides = [stride for size, stride in zip(made.shape, made.stride(), strict=True) if size != 1]
    return [(tuple(made.shape), made.dtype, strides)]


def on_meta(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.to("meta") for tensor in tensors]


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OWN_STATE])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_results_have_the_shapes_of_the_real_ones(name: str, last: bool) -> None:
    function, tensors = CALLS[name]
    tensors = tuple(t.contiguous(memory_format=torch.channels_last) if last and t.dim() == 4 else t.clone() for t in tensors)
    assert described(function(*on_meta(tensors))) == described(function(*tensors))


def test_a_slice_of_a_wider_tensor_is_what_is_returned() -> None:
    wide = torch.empty(2, 9, 4, 5, device="meta").contiguous(memory_format=torch.channels_last)
    into = Into(None, wide[:, 3:], 9)
    x, a, b = on_meta((X, vector(1), vector(2)))
    assert normalize(x, a, b, None, "relu", None, want_float=True, want_mask=False, into=into).output is into.output
    operands = on_meta((Q, ONE, W, ONE))
    made = conv_normalize(*operands, FLAT, a, b, None, "relu", SINGLE.to("meta"), want_float=False)
    assert made.q is not None and made.q.values.shape == X.shape and made.output is None


def test_pools_keep_their_shapes() -> None:
    window = Window((3, 3), (2, 2), (1, 1), (1, 1))
    x = X.to("meta")
    y, taps = pooling.max_pool(x, window)
    assert described((y, taps)) == described(pooling.max_pool(X, window))
    assert described(pooling.max_pool_grad(y, taps, x.shape, window)) == described(
        torch.empty_like(x).contiguous(memory_format=torch.channels_last)
    )
    assert not pooling.has_max_pool(x, window) and pooling.take_pixels(x, (2, 2)) is None
