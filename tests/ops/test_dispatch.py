# SPDX-License-Identifier: Apache-2.0
"""The short way past PyTorch's dispatcher: taken by plain tensors only, with the same results and the same errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from byteback import ops
from byteback.ops import dispatch, products
from byteback.ops.backends import paths

Context = Callable[[], AbstractContextManager[Any]]
ONE = torch.ones(1, 1, 1, 1)
GEOMETRY = ([1, 1], [1, 1], [1, 1], 1)


class FunctionSpy(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class DispatchSpy(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Labelled(Tensor):
    """A subclass that watches nothing, but could."""


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [lambda: torch.ones(2, 3), lambda: Parameter(torch.ones(2, 3))], ids=["tensor", "parameter"])
def test_plain_tensors_take_the_short_way(
    make: Callable[[], Tensor], context: Callable[[], AbstractContextManager[Any]]
) -> None:
    x = make()
    assert dispatch.is_plain((x, None, 1, [1, 2], (3,), x.shape))
    with context():
        assert dispatch.is_plain((x,)) and dispatch.is_plain((make(),))


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, device="meta"),
        torch.ones(2).as_subclass(Labelled),
        torch.ones(2, dtype=torch.complex64).conj().imag,  # its sign is a bit that data_ptr does not know
        torch._efficientzerotensor(2),
        torch.ones(2).to_sparse(),
        torch.ones(2).numpy(),
        2.5,
    ],
    ids=["meta", "subclass", "negative view", "zero tensor", "sparse", "numpy", "float"],
)
def test_everything_else_goes_through_the_dispatcher(x: Any) -> None:
    assert not dispatch.is_plain((x,))


@pytest.mark.parametrize("spy", [FunctionSpy, DispatchSpy])
def test_modes_see_the_operator(spy: type[FunctionSpy | DispatchSpy]) -> None:
    with spy() as watched:
        ops.absmax(torch.ones(2, 3))
    assert any("byteback.absmax" in name or "byteback::absmax" in name for name in watched.seen)


def test_the_profiler_sees_the_operator() -> None:
    with torch.profiler.profile() as profiler:
        ops.absmax(torch.ones(2, 3))
    assert any(event.key == "byteback::absmax" for event in profiler.key_averages())


def test_transforms_and_tracers_keep_their_dispatcher() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(dispatch.is_plain((x,)))
        return x

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2, 3))
    torch.jit.trace(look, torch.ones(2, 3), check_trace=False)
    assert seen == [False] * len(seen) and len(seen) >= 3


def test_a_negative_view_is_quantized_as_it_reads() -> None:
    x = torch.complex(torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 4.0]])).conj().imag
    assert ops.quantize_max(x)[0].tolist() == [[-32, -64, -127]]


@pytest.mark.parametrize("path", paths.available())
def test_nothing_that_requires_a_gradient_gets_one(path: str) -> None:
    x, clip = torch.randn(2, 3, 4, 4, requires_grad=True), torch.full((1, 1, 1, 1), 2.0, requires_grad=True)
    scale = torch.ones(1, 1, 1, 1, requires_grad=True)
    with paths.path(path):
        q = ops.quantize(x, clip)
        results = [*q, *ops.quantize_max(x), ops.absmax(x), ops.absmax(x, 2), *ops.moments(x), ops.tail_count(x, clip)]
        results += [*ops.quantize(x, clip.expand(1, 1, 4, 1)), ops.dot_terms(x, q[0], scale)]
        results += [ops.cosine_terms(x, clip.flatten()), ops.cosine_slope_terms(x, clip.squeeze())]
        results += [ops.conv_int8(q[0], scale, q[0], scale, *GEOMETRY)]
        results += [ops.matmul_int8(q[0][0, 0], scale[0, 0], q[0][0, 0], scale[0, 0])]
    assert not any(result.requires_grad for result in results)


def test_both_ways_give_the_same_bits_and_strides(oracle: Any) -> None:
    for layout in ("contiguous", "channels_last", "permuted", "sliced", "expanded"):
        x = oracle.laid_out(oracle.operand((2, 3, 5, 6)), layout)
        w = oracle.operand((4, 3, 3, 3), seed=1)
        arguments = (x, ONE, w, ONE, *GEOMETRY)
        short, long = ops.conv_int8(*arguments), torch.ops.byteback.conv_int8(*arguments)
        assert torch.equal(short, long) and short.stride() == long.stride(), layout


def test_a_remembered_plan_does_not_serve_other_arguments() -> None:
    """The same shapes with another dtype, scale or geometry are checked anew, however often the right ones were served."""
    x, w = torch.ones(1, 2, 4, 4, dtype=torch.int8), torch.ones(2, 2, 3, 3, dtype=torch.int8)
    for _ in range(3):
        assert ops.conv_int8(x, ONE, w, ONE, *GEOMETRY).shape == (1, 2, 4, 4)
        assert ops.conv_int8(x, ONE, w, ONE, [1, 1], [0, 0], [1, 1], 1).shape == (1, 2, 2, 2)
        with pytest.raises(TypeError, match=r"input has dtype torch\.float32"):
            ops.conv_int8(x.float(), ONE, w, ONE, *GEOMETRY)
        with pytest.raises(TypeError, match=r"scale has dtype torch\.float64"):
            ops.conv_int8(x, ONE.double(), w, ONE, *GEOMETRY)
        with pytest.raises(ValueError, match="varies along C"):
            ops.conv_int8(x, ONE.expand(1, 2, 1, 1), w, ONE, *GEOMETRY)
        with pytest.raises(ValueError, match="groups is 2"):
            ops.conv_int8(x, ONE, w, ONE, [1, 1], [1, 1], [1, 1], 2)


def test_the_memory_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 5)
    w = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    for size in range(1, 20):
        ops.conv_int8(torch.ones(1, 1, size, 1, dtype=torch.int8), ONE, w, ONE, [1, 1], [0, 0], [1, 1])
    assert len(products._calls) <= 5
