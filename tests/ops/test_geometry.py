# SPDX-License-Identifier: Apache-2.0
"""stride, padding, dilation, groups, sizes and axes: what PyTorch takes is taken, everything else is a clear error.

Also where a plan for the right numbers is remembered: 1.0 and True are equal to 1, so a plan could be found by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from byteback import ops
from byteback.ops.backends import paths

PATHS = pytest.mark.parametrize("path", ["reference", paths.available()[0]])
X, W = torch.ones(2, 4, 8, 8, dtype=torch.int8), torch.ones(6, 4, 3, 3, dtype=torch.int8)
G, ONE, VECTOR = torch.ones(2, 6, 8, 8, dtype=torch.int8), torch.ones(1, 1, 1, 1), torch.ones(6)
RIGHT: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
NORM = ops.BatchNorm(None, None, None, 1e-5, None, 0.1)
WANTS = {"want_int8": True, "want_float": True, "want_mask": False}
PRODUCTS: dict[str, Callable[..., Any]] = {
    "conv_int8": lambda *rest: ops.conv_int8(X, ONE, W, ONE, *rest),
    "conv_int8_grad_input": lambda *rest: ops.conv_int8_grad_input(G, ONE, W, ONE, [2, 4, 8, 8], *rest),
    "conv_int8_grad_weight": lambda *rest: ops.conv_int8_grad_weight(G, ONE, X, ONE, [6, 4, 3, 3], *rest),
    "conv_normalize": lambda *rest: (
        ops.conv_normalize(X, ONE, W, ONE, rest, VECTOR, VECTOR, None, "relu", None, want_float=True).output
    ),
    "conv_normalize_batch": lambda *rest: ops.conv_normalize_batch(X, ONE, W, ONE, rest, NORM, None, "relu", **WANTS)[0],
}
EACH = pytest.mark.parametrize("op", list(PRODUCTS))


def product(op: str, **changes: Any) -> Any:
    return PRODUCTS[op](*(RIGHT | changes).values())


@PATHS
@EACH
@pytest.mark.parametrize("one", [1, np.int64(1), np.int8(1), torch.tensor(1)], ids=["int", "int64", "int8", "tensor"])
def test_one_integer_stands_for_all_axes(op: str, one: Any, path: str) -> None:
    with paths.path(path):
        expected = product(op)
        for name in ("stride", "padding", "dilation", "groups"):
            assert torch.equal(product(op, **{name: one}), expected), name
            if name != "groups":
                assert torch.equal(product(op, **{name: [one, one]}), expected), name


@PATHS
@EACH
@pytest.mark.parametrize("wrong", [1.0, True, "1", None, np.float32(1), (1, 1.0), [True, True], [[1], [1]], {1}], ids=repr)
def test_numbers_that_are_no_integers_are_refused(op: str, wrong: Any, path: str) -> None:
    with paths.path(path):
        product(op)  # a plan that 1.0 and True would be equal to
        for name in ("stride", "padding", "dilation", "groups"):
            with pytest.raises(TypeError, match=rf"{op}: {name} is .*Pass an integer"):
                product(op, **{name: wrong})


@PATHS
@EACH
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("wrong", [-1, [1, -1], [1], [1, 1, 1], [], [1] * 9], ids=str)
def test_numbers_that_fit_no_image_are_refused(op: str, name: str, wrong: Any, path: str) -> None:
    op_named = "conv_int8" if op.startswith("conv_normalize") else op  # the product that does not exist
    with paths.path(path), pytest.raises(ValueError, match=rf"{op_named}: {name} is .*must be 2 integers of at least [01]"):
        product(op, **{name: wrong})


@PATHS
@EACH
@pytest.mark.parametrize("huge", [2**31, 2**63, 2**70, -(2**70)], ids=["2^31", "2^63", "2^70", "-2^70"])
def test_huge_numbers_are_refused(op: str, huge: int, path: str) -> None:
    for name in ("stride", "padding", "dilation", "groups"):
        for value in (huge,) if name == "groups" else (huge, [1, huge]):
            with paths.path(path), pytest.raises(ValueError, match=f"{op}: {name} is {huge}, but must be at most"):
                product(op, **{name: value})


@PATHS
def test_an_output_that_no_memory_holds_is_refused(path: str) -> None:
    for padding in ([2**31 - 1, 2**31 - 1], [2**30, 2**31 - 1]):
        with (
            paths.path(path),
            pytest.raises(ValueError, match=r"conv_int8: .*the output would have shape .*does not fit into memory"),
        ):
            ops.conv_int8(X, ONE, W, ONE, 1, padding, 1)


@PATHS
def test_a_stride_beyond_the_image_leaves_one_pixel(path: str) -> None:
    with paths.path(path):
        assert ops.conv_int8(X, ONE, W, ONE, 2**31 - 1, 0, 1).shape == (2, 6, 1, 1)


@PATHS
@pytest.mark.parametrize("wrong", [[2.0, 4, 8, 8], [2, 4, True, 8], ["2", 4, 8, 8], 4, None, {2: 4}], ids=repr)
def test_sizes_that_are_no_integers_are_refused(wrong: Any, path: str) -> None:
    with paths.path(path):
        product("conv_int8_grad_input")
        with pytest.raises(TypeError, match=r"conv_int8_grad_input: input_size .* Pass"):
            ops.conv_int8_grad_input(G, ONE, W, ONE, wrong, 1, 1, 1)
        with pytest.raises(TypeError, match=r"conv_int8_grad_weight: weight_size .* Pass"):
            ops.conv_int8_grad_weight(G, ONE, X, ONE, wrong, 1, 1, 1)


@PATHS
def test_sizes_of_numpy_are_sizes(path: str) -> None:
    size = list(np.array(X.shape))
    with paths.path(path):
        assert ops.conv_int8_grad_input(G, ONE, W, ONE, size, 1, 1, 1).shape == X.shape


@PATHS
@pytest.mark.parametrize("wrong", [1.0, True, None, [1]], ids=repr)
def test_an_axis_or_rank_that_is_no_integer_is_refused(wrong: Any, path: str) -> None:
    x, number = torch.ones(2, 3), torch.tensor(1)
    with paths.path(path):
        for call, op in (
            (lambda: ops.absmax(x, wrong), "absmax: axis"),
            (lambda: ops.quantize_max(x, wrong), "quantize_max: axis"),
            (lambda: ops.noise_key(number, number, number, wrong), "noise_key: rank"),
        ):
            with pytest.raises(TypeError, match=f"{op} is .*Pass an integer"):
                call()
        assert ops.absmax(x, np.int64(1)).shape == (1, 3) and ops.quantize_max(x, np.int64(1))[1].shape == (1, 3)


@pytest.mark.parametrize("length", [3, 5])
def test_a_geometry_of_another_length_is_refused(length: int) -> None:
    for op in ("conv_normalize", "conv_normalize_batch"):
        with pytest.raises(ValueError, match=f"{op}: geometry has {length} entries"):
            PRODUCTS[op](*(1,) * length)


@PATHS
def test_tensors_of_many_axes(path: str) -> None:
    """The native library makes tensors of up to eight axes; others are PyTorch's."""
    x = torch.randn(2, 3, *(1,) * 8, generator=torch.Generator().manual_seed(0))
    flat, key = x.reshape(2, 3), torch.tensor([1, 2])
    with paths.path(path):
        assert torch.equal(ops.quantize_max(x, -1, key)[0].reshape(2, 3), ops.quantize_max(flat, -1, key)[0])
        clip = torch.ones((1,) * 10)
        assert torch.equal(
            ops.quantize(x, clip, key)[0].reshape(2, 3), ops.quantize(flat, clip[0, 0, 0, 0, 0, 0, 0, 0], key)[0]
        )
