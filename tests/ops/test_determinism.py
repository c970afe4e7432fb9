# SPDX-License-Identifier: Apache-2.0
"""Proves that equal inputs give equal bits whatever surrounds the call: thread count, autocast, other Python threads.

Sizes are large enough for torch to really split the work (its grain is 32768 elements for elementwise loops).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from byteback import ops

Result = list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]]


def i8(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def bits(result: Any) -> Result:
    """dtype, shape, strides and bytes of everything an operator returned, a tensor or tuples of them."""
    if isinstance(result, tuple):
        return [each for part in result if part is not None for each in bits(part)]
    numbers = result.view(torch.int16) if result.dtype == torch.bfloat16 else result  # numpy has no bfloat16
    return [(result.dtype, tuple(result.shape), result.stride(), np.ascontiguousarray(numbers.numpy()).tobytes())]


S4 = torch.full((1, 1, 1, 1), 0.01)
S2 = torch.full((1, 1), 0.01)
X, W, G = i8(4, 32, 20, 20), i8(48, 32, 3, 3, seed=1), i8(4, 48, 20, 20, seed=2)
GEOMETRY = ([1, 1], [1, 1], [1, 1], 1)
F4 = floats(8, 17, 31, 29)
CLIP = torch.full((1, 1, 1, 1), 2.5)
KEY = torch.tensor([0x12345678, 0x9ABCDEF0])
V = [floats(17) + i for i in range(5)]
ONE = torch.tensor(1.5)
PARTS = ops.GradientParts(F4, F4, *V[:2], None, "relu6", *V[2:])


def _flat(batch: Any) -> tuple[Any, ...]:
    return (*batch.norm, *batch[:4])


def _product(y: Tensor, batch: Any) -> tuple[Any, ...]:
    return (y, *_flat(batch))


CALLS: dict[str, Callable[[], Any]] = {
    "conv_int8": lambda: ops.conv_int8(X, S4, W, S4, *GEOMETRY),
    "conv_int8_deep": lambda: ops.conv_int8(i8(2, 1100, 6, 6), S4, i8(8, 1100, 3, 3, seed=3), S4, *GEOMETRY),
    "conv_normalize": lambda: ops.conv_normalize(
        *(X, S4, W, S4, GEOMETRY, floats(48), floats(48), None, "relu", ONE), want_float=True
    ),
    "conv_int8_grad_input": lambda: ops.conv_int8_grad_input(G, S4, W, S4, [4, 32, 20, 20], *GEOMETRY),
    "conv_int8_grad_weight": lambda: ops.conv_int8_grad_weight(G, S4, X, S4, [48, 32, 3, 3], *GEOMETRY),
    "conv_int8_grad_weight_deep": lambda: ops.conv_int8_grad_weight(
        i8(2, 3, 40, 40), S4, i8(2, 4, 40, 40), S4, [3, 4, 3, 3], *GEOMETRY
    ),
    "matmul_int8": lambda: ops.matmul_int8(i8(64, 3000), S2, i8(3000, 48, seed=4), S2),
    "quantize_to_nearest": lambda: ops.quantize(F4, CLIP),
    "quantize_stochastically": lambda: ops.quantize(F4, CLIP, KEY),
    "quantize_max": lambda: ops.quantize_max(F4),
    "quantize_max_per_channel": lambda: ops.quantize_max(F4, 1, KEY),
    "noise_key": lambda: ops.noise_key(torch.tensor(3), torch.tensor(4), torch.tensor(5), 6),
    "absmax": lambda: ops.absmax(F4),
    "absmax_per_channel": lambda: ops.absmax(F4, 1),
    "moments": lambda: ops.moments(F4),
    "tail_count": lambda: ops.tail_count(F4, CLIP),
    "dot_terms": lambda: ops.dot_terms(F4, i8(8, 17, 31, 29), S4),
    "cosine_terms": lambda: ops.cosine_terms(F4, torch.tensor([0.5, 1.0, 2.0])),
    "cosine_terms, expected": lambda: ops.cosine_terms(F4, torch.tensor([0.5, 1.0, 2.0]), stochastic=True),
    "channel_cosine_terms": lambda: ops.channel_cosine_terms(F4, torch.stack([V[3].abs(), V[4].abs()])),
    "channel_cosine_terms, expected": lambda: ops.channel_cosine_terms(F4, V[3].abs().reshape(1, -1), stochastic=True),
    "cosine_slope_terms": lambda: ops.cosine_slope_terms(F4, torch.tensor(1.5)),
    "sum_channels": lambda: ops.sum_channels(floats(1, 777, 1, 1).double()),
    "sum_last": lambda: ops.sum_last(floats(3, 777).double()),
    "channel_stats": lambda: ops.channel_stats(F4),
    "norm_coefficients": lambda: ops.norm_coefficients(ops.channel_stats(F4), 7192, *V[:3], 1e-5, None, 0.1, "relu"),
    "norm_folded": lambda: ops.norm_folded(V[0], V[1].abs(), V[2], V[3], V[4], 1e-5),
    "norm_invstd": lambda: (ops.norm_invstd(V[1].abs(), 1e-5),),
    "norm_gradient": lambda: ops.norm_gradient(V[0], *(v.double() for v in V[1:5]), 7192),
    "normalize_peak": lambda: ops.normalize_peak(F4, *V[:2], F4, "silu"),
    "normalize": lambda: ops.normalize(F4, *V[:2], F4, "relu", ONE, want_float=True, want_mask=True, keep="bfloat16"),
    "normalize_batch": lambda: _flat(
        ops.normalize_batch(
            F4,
            ops.BatchNorm(*V[:3], 1e-5, None, 0.1),
            F4,
            "relu",
            want_int8=True,
            want_float=True,
            want_mask=True,
        )
    ),
    "conv_normalize_batch": lambda: _product(
        *ops.conv_normalize_batch(
            *(i8(8, 32, 40, 40), S4, i8(192, 32, 1, 1, seed=5), S4, ([1, 1], [0, 0], [1, 1], 1)),
            *(ops.BatchNorm(floats(192), None, None, 1e-5, None, 0.1), None, "relu"),
            **{"want_int8": True, "want_float": True, "want_mask": True, "keep": "bfloat16"},
        )
    ),
    "gradient_sums": lambda: ops.gradient_sums(*V[:3], *(v.double() for v in V[3:]), 1e-5, *(v.double() for v in V[:3]), 99),
    "normalize_grad_batch": lambda: ops.normalize_grad_batch(
        *(F4, F4, *V[:2], None, "relu", V[2].double(), V[3].double(), 1e-5), want_masked=True, want_sums=True
    ),
    "normalize_grad_sums": lambda: ops.normalize_grad_sums(F4, F4, *V[:2], None, "relu6", want_masked=True),
    "add_waiting": lambda: (ops.add_waiting(F4, F4, None),),
    "normalize_grad": lambda: ops.normalize_grad(PARTS._replace(activation="hardswish")),
    "normalize_grad_quantize_pair": lambda: sum(
        ops.normalize_grad_quantize_pair(PARTS, ONE, V[3].abs().reshape(1, -1, 1, 1), KEY), ()
    ),
    "normalize_grad_tails": lambda: ops.normalize_grad_tails(PARTS, V[1].abs(), ONE),
    "normalize_grad_quantize": lambda: ops.normalize_grad_quantize(PARTS, ONE, KEY),
    "normalize_grad_quantize_by_ratio": lambda: ops.normalize_grad_quantize_by_ratio(PARTS, 0.7, KEY),
    "pack_norm": lambda: ops.pack_norm(F4, -V[4].abs() - 1, V[4].abs() + 1, V[0], "int8"),
    "quantize_pair": lambda: ops.quantize_pair(F4, ONE, V[3].reshape(1, -1, 1, 1), KEY),
    "tail_count_pair": lambda: ops.tail_count_pair(F4, V[1], ONE),
}
by_call = pytest.mark.parametrize("call", list(CALLS))


def test_every_operator_is_listed_here() -> None:
    names = [name for name in ops.__all__ if name[0].islower()]  # the others are types and constants
    assert [name for name in names if not any(call.startswith(name) for call in CALLS)] == []


@by_call
def test_two_threads_give_the_bits_of_one(call: str, restore_threads: None) -> None:
    torch.set_num_threads(1)
    alone = bits(CALLS[call]())
    torch.set_num_threads(2)
    assert bits(CALLS[call]()) == alone


@by_call
def test_autocast_changes_nothing(call: str) -> None:
    plain = bits(CALLS[call]())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
        assert bits(CALLS[call]()) == plain
        assert torch.is_autocast_enabled("cpu")


@by_call
def test_inference_mode_and_no_grad_change_nothing(call: str) -> None:
    plain = bits(CALLS[call]())
    with torch.no_grad():
        assert bits(CALLS[call]()) == plain
    with torch.inference_mode():
        assert bits(CALLS[call]()) == plain


def test_several_python_threads_at_once_give_the_bits_of_one() -> None:
    expected = {name: bits(call()) for name, call in CALLS.items()}
    wrong: list[str] = []
    start = threading.Barrier(4)

    def worker(offset: int) -> None:
        start.wait()
        names = list(CALLS)
        for name in names[offset:] + names[:offset]:
            try:
                if bits(CALLS[name]()) != expected[name]:
                    wrong.append(name)
            except Exception as error:
                wrong.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=worker, args=(4 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_calls_leave_the_nnpack_switch_as_it_was() -> None:
    before = torch._C._get_nnpack_enabled()
    try:
        for enabled in (True, False):
            torch.backends.nnpack.set_flags(enabled)
            CALLS["conv_int8"]()
            assert torch._C._get_nnpack_enabled() is enabled
    finally:
        torch.backends.nnpack.set_flags(before)


@by_call
def test_a_call_changes_none_of_its_arguments(call: str) -> None:
    shared = (X, W, G, S4, S2, F4, CLIP, KEY, *V, ONE)
    before = [bits(tensor) for tensor in shared]
    CALLS[call]()
    assert [bits(tensor) for tensor in shared] == before
