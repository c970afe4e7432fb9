# SPDX-License-Identifier: Apache-2.0
"""Proves that PyTorch may trust our registrations: torch.library.opcheck on every operator, in several layouts.

opcheck runs the schema test (no undeclared mutation or aliasing), the fake kernel against the real one (shape, dtype,
strides), the autograd registration and the whole operator under AOTAutograd with dynamic shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from byteback import ops

ONE = torch.full((1, 1, 1, 1), 0.01)
GEOMETRY = ([2, 1], [1, 0], [1, 2], 2)
Lay = Callable[[Tensor], Tensor]


def i8(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def per(n: int, axis: int) -> Tensor:
    return torch.rand([n if dim == axis else 1 for dim in range(4)]) + 0.1


# The convolution: input (3, 4, 7, 8), weight (6, 2, 3, 3), output (3, 6, 4, 4).
SAMPLES: dict[str, Callable[[Lay], tuple[Any, ...]]] = {
    "conv_int8": lambda lay: (lay(i8(3, 4, 7, 8)), per(3, 0), lay(i8(6, 2, 3, 3)), per(6, 0), *GEOMETRY),
    "conv_int8_grad_input": lambda lay: (
        *(lay(i8(3, 6, 4, 4)), per(3, 0), lay(i8(6, 2, 3, 3)), per(2, 1), [3, 4, 7, 8]), *GEOMETRY,
    ),
    "conv_int8_grad_weight": lambda lay: (
        *(lay(i8(3, 6, 4, 4)), per(6, 1), lay(i8(3, 4, 7, 8)), per(4, 1), [6, 2, 3, 3]), *GEOMETRY,
    ),
    "matmul_int8": lambda lay: (lay(i8(5, 7)), torch.rand(5, 1), lay(i8(7, 6)), torch.rand(1, 6)),
    "quantize": lambda lay: (lay(floats(3, 5, 4, 2)), lay(per(5, 1)), None),
    "quantize_stochastic": lambda lay: (lay(floats(3, 5, 4, 2)), lay(per(3, 0)), torch.tensor([1, 2])),
    "quantize_max": lambda lay: (lay(floats(3, 5, 4, 2)), -1, None),
    "quantize_max_per_channel": lambda lay: (lay(floats(3, 5, 4, 2)), 1, torch.tensor([1, 2])),
    "quantize_max_per_sample": lambda lay: (lay(floats(3, 5, 4, 2)), 0, None),
    "noise_key": lambda lay: (torch.tensor(1), torch.tensor(2), torch.tensor(3), 4),
    "absmax": lambda lay: (lay(floats(3, 5, 4, 2)), -1),
    "absmax_per_channel": lambda lay: (lay(floats(3, 5, 4, 2)), 1),
    "absmax_per_sample": lambda lay: (lay(floats(3, 5, 4, 2)), 0),
    "moments": lambda lay: (lay(floats(3, 5, 4, 2)),),
    "tail_count": lambda lay: (lay(floats(3, 5, 4, 2)), per(5, 1)),
    "dot_terms": lambda lay: (lay(floats(3, 5, 4, 2)), lay(i8(3, 5, 4, 2)), ONE),
    "cosine_terms": lambda lay: (lay(floats(3, 5, 4, 2)), torch.tensor([0.5, 1.0]), True),
    "channel_cosine_terms": lambda lay: (lay(floats(3, 5, 4, 2)), torch.rand(2, 5), False),
    "cosine_slope_terms": lambda lay: (lay(floats(3, 5, 4, 2)), torch.tensor(1.0)),
}  # fmt: skip


def operator(sample: str) -> Any:
    name = sample.removesuffix("_stochastic").removesuffix("_per_channel").removesuffix("_per_sample")
    return getattr(torch.ops.byteback, name).default


def test_every_operator_of_this_floor_has_a_sample() -> None:
    # The other functions of the floor (sum_channels, the fused block's passes) are plain functions, seen by no tracer;
    # operators that upper floors register are checked there.
    operators = {name for name in ops.__all__ if hasattr(torch.ops.byteback, name)}
    assert {str(operator(sample)).split(".")[1] for sample in SAMPLES} == operators


@pytest.mark.parametrize("sample", list(SAMPLES))
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced"])
def test_opcheck_accepts(oracle: Any, sample: str, layout: str) -> None:
    arguments = SAMPLES[sample](lambda x: oracle.laid_out(x, layout))
    torch.library.opcheck(operator(sample), arguments)


@pytest.mark.parametrize("sample", ["conv_int8", "conv_int8_grad_input", "conv_int8_grad_weight"])
@pytest.mark.parametrize("rank", [3, 5], ids=["1d", "3d"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted"])
def test_opcheck_accepts_other_dimensions(oracle: Any, sample: str, rank: int, layout: str) -> None:
    spatial = rank - 2
    geometry = ([1] * spatial, [1] * spatial, [1] * spatial, 1)
    operands = oracle.triple([2, 3, *[4] * spatial], [5, 3, *[3] * spatial], geometry, ["random"] * 3)
    x, w, g = (oracle.laid_out(operand, layout) for operand in operands)
    one = torch.ones((1,) * rank)
    arguments = {
        "conv_int8": (x, one, w, one, *geometry),
        "conv_int8_grad_input": (g, one, w, one, list(x.shape), *geometry),
        "conv_int8_grad_weight": (g, one, x, one, list(w.shape), *geometry),
    }
    torch.library.opcheck(operator(sample), arguments[sample])


@pytest.mark.parametrize(
    "sample", ["quantize", "quantize_max", "moments", "absmax", "tail_count", "cosine_terms", "channel_cosine_terms"]
)
def test_fake_and_real_agree_on_an_empty_batch(sample: str) -> None:
    x = torch.zeros(0, 5, 4, 2)
    arguments = {
        "quantize": (x, torch.ones(1, 1, 1, 1), None),
        "quantize_max": (x, -1, None),
        "moments": (x,),
        "absmax": (x, 1),
        "tail_count": (x, torch.ones(1, 1, 1, 1)),
        "cosine_terms": (x, torch.ones(2), False),
        "channel_cosine_terms": (x, torch.ones(2, x.shape[1]), True),
    }
    torch.library.opcheck(operator(sample), arguments[sample], test_utils=("test_schema", "test_faketensor"))
