# SPDX-License-Identifier: Apache-2.0
"""The training step of a fused block in the native library: one call per direction (csrc/bindings/bindings_step.cpp).

`make_site` checks once what does not change from step to step, and creates the plans of the library from it. A step then only
compares the addresses of parameters and buffers. If one has moved, they are checked again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from byteback.ops.activations import MASK_GATE, TABLE
from byteback.ops.backends.cpu import allocator, ledger, library
from byteback.ops.backends.cpu.addresses import KINDS, dense, flat, known, places
from byteback.ops.backends.cpu.block import STORED, forward_pass
from byteback.ops.backends.cpu.norm import is_writable
from byteback.ops.backends.cpu.products import conv_shape
from byteback.ops.backends.cpu.rows import rows
from byteback.ops.block_step import BlockShape
from byteback.ops.contract.layout import dense_strides, is_last_dense, last_strides, lies_last
from byteback.ops.programs import Averaged, Held
from byteback.ops.types import QTensor

_native: Any = library.native
# Bound once: after a large layer every attribute look-up in torch is a cache miss.
_threads = torch.get_num_threads
_tensor_of = allocator.tensor_of
_FLOAT32, _INT64 = torch.float32, torch.int64
_HELD, _RATIO, _PAIR = range(3)  # enum class Clips in csrc/bindings/bindings_step.cpp
_BUFFERS = 6  # of a quantizer
Saved = tuple[Tensor | None, ...]


class Site:
    """One call site of a block: the plans of its shapes and of its clip rule, and the last addresses of its tensors."""

    def __init__(self, path: int, plan: Any, gradient: Any, shape: BlockShape, momentum: float, slot: int) -> None:
        self._path, self._plan, self._gradient, self._slot = path, plan, gradient, slot
        self._channels, self._weights, self._momentum = shape.size[1], math.prod(shape.weight_size), momentum
        self._x_strides, self._strides = last_strides(shape.x_size), last_strides(shape.size)
        self._forward: Any = None
        self._backward: Any = None
        self._forward_at: list[int] = []
        self._backward_at: list[int] = []

    def forward(
        self,
        x: QTensor,
        clip: Tensor,
        residual: Tensor | None,
        tensors: tuple[Tensor, ...],
        momentum: float,
    ) -> list[Any] | None:
        """Runs forward. ops/block_step.py describes arguments and results."""
        values, scale, counts, _ = x
        if values.stride() != self._x_strides or (residual is not None and residual.stride() != self._strides):
            return None
        there = places(tensors)
        if there != self._forward_at:
            if not self._place_forward(tensors):
                return None
            self._forward_at = there
        made = _native.block_forward(
            self._path,
            self._plan,
            self._forward,
            known(values),
            flat(scale, _FLOAT32, 1),
            flat(clip, _FLOAT32, 1),
            flat(counts, _INT64, 2),
            known(residual),
            momentum,
            allocator.limit,
            _threads(),
        )
        if made is None:
            return None
        library.last_kernel, capsules = made
        return [None if capsule is None else _tensor_of(capsule) for capsule in capsules]

    def _place_forward(self, tensors: tuple[Tensor, ...]) -> bool:
        """Checks the tensors and passes their addresses to the library. Returns False if it cannot use one of them."""
        weight, gamma, beta, mean, var, iteration, *buffers = tensors
        if not is_writable((mean, var)) or not ledger.is_ready(tuple(buffers), self._slot):  # type: ignore[arg-type]
            return False
        vectors = {"gamma": gamma, "beta": beta, "running_mean": mean, "running_var": var}
        self._forward = _native.ForwardTensors(
            weight=dense(weight, _FLOAT32, self._weights),
            **{name: flat(vector, _FLOAT32, self._channels) for name, vector in vectors.items()},
            input=self._row(buffers, self._momentum),
            iteration=flat(iteration, _INT64, 1),
        )
        return True

    @staticmethod
    def places(saved: Saved) -> list[int]:
        """Returns the addresses of the tensors that were saved for backward."""
        return places(saved)

    def can_add(self, g: Tensor, mask: Tensor | None) -> bool:
        """Whether `backward` can add this gradient to grad_input."""
        return g.stride() == self._x_strides

    def backward(
        self,
        g: Tensor,
        saved: Saved,
        saved_at: list[int],
        tensors: tuple[Tensor | None, ...],
        waiting: tuple[Tensor, Tensor | None] | None,
        rounds: bool,
        want_masked: bool,
        rank: int,
        counts_iteration: bool,
    ) -> tuple[bool, int, tuple[int, int], list[Any]] | None:
        """Runs backward. ops/block_step.py describes arguments and results."""
        if g.stride() != self._strides or places(saved) != saved_at:
            return None
        there = places(tensors)
        if there != self._backward_at:
            if not self._place_backward(tensors):
                return None
            self._backward_at = there
        x, x_scale, w, w_scale, _, _, mask, a, b, mean, invstd, *kept = saved_at
        done, now, word, other, capsules = _native.block_backward(
            self._path,
            self._plan,
            self._backward,
            self._gradient,
            known(g),
            KINDS[g.dtype],
            x,
            x_scale,
            w,
            w_scale,
            mask,
            a,
            b,
            mean,
            invstd,
            *(kept if len(kept) > 1 else (kept[0], 0, 0)),
            *((0, 0, 0) if waiting is None else (known(waiting[0]), known(waiting[1]), KINDS[waiting[0].dtype])),
            rounds,
            want_masked,
            rank,
            counts_iteration,
            allocator.limit,
            _threads(),
        )
        return done, now, (word, other), [None if capsule is None else _tensor_of(capsule) for capsule in capsules]

    def _place_backward(self, tensors: tuple[Tensor | None, ...]) -> bool:
        seed, layer, count, iteration, *numbers = tensors
        quantizers = [tuple(numbers[at : at + _BUFFERS]) for at in range(0, len(numbers), _BUFFERS)]
        if not all(ledger.is_ready(buffers, self._slot) for buffers in quantizers):  # type: ignore[arg-type]
            return False
        counters = {"seed": seed, "layer": layer, "count": count, "iteration": iteration}
        self._backward = _native.BackwardTensors(
            gradient=self._row(quantizers[0], 0.0),
            per_channel=self._row(quantizers[-1], 0.0),
            **{name: flat(number, _INT64, 1) for name, number in counters.items()},
        )
        return True

    def _row(self, buffers: Any, momentum: float) -> Any:
        return _native.QuantizerRow(**ledger.row(tuple(buffers), self._slot), momentum=momentum)


def make_site(path: int, shape: BlockShape, settings: tuple[Any, ...], for_tensor: bool, slot: int) -> Site | None:
    """Returns the site of a block of this shape; None if the operators must run one by one.

    `settings` are those of the input, of the gradient, and of its second copy if there is one.
    """
    gradient = _gradient_plan(settings[1:], for_tensor)
    plan = _plan(shape, settings[0].observe_every)
    if gradient is None or plan is None:
        return None
    return Site(path, plan, gradient, shape, settings[0].momentum, slot)


def _plan(shape: BlockShape, observe_every: int) -> Any:
    """Returns the BlockPlan (csrc/bindings/bindings_step.cpp); None for layouts that it does not support."""
    size, row, wants = shape.size, TABLE[shape.activation], shape.wants
    weight = torch.empty_strided(shape.weight_size, shape.weight_strides, device="meta")
    is_last = is_last_dense(weight.shape, weight.stride())
    if (
        row.is_smooth
        or 0 in (*shape.x_size, *size)
        or not (is_last or weight.is_contiguous())
        or len(size) > allocator.MOST_AXES
    ):
        return None
    # A gradient is channels last if one of its two operands is, as in PyTorch (layout.py).
    last = lies_last(size, last_strides(size)) or lies_last(weight.shape, weight.stride())
    grad_input = shape.x_size, dense_strides(list(shape.x_size), last)
    last = lies_last(size, last_strides(size)) or lies_last(shape.x_size, last_strides(shape.x_size))
    grad_weight = shape.weight_size, dense_strides(list(shape.weight_size), last)
    if not is_last_dense(*grad_input) or not is_last_dense(*grad_weight):
        return None
    pixels, added = math.prod(size) // size[1], shape.residual
    stored = wants.y, added or _FLOAT32, wants.output
    return _native.BlockPlan(
        conv=conv_shape(shape.x_size, shape.weight_size, size, shape.geometry),
        forward=forward_pass(pixels, size[1], shape.activation, STORED[wants.keep], None, added is not None, stored),
        gate=MASK_GATE if wants.mask else row.gate,
        weight=rows(weight)[1],
        weight_is_last=is_last,
        int8=wants.int8,
        floats=wants.float,
        mask=wants.mask,
        observe_every=observe_every,
        eps=shape.eps,
        output=(size, last_strides(size)),
        weight_values=(shape.weight_size, last_strides(shape.weight_size)),
        grad_input=grad_input,
        grad_weight=grad_weight,
    )


def _gradient_plan(settings: tuple[Any, ...], for_tensor: bool) -> Any:
    """Returns the GradientPlan (csrc/bindings/bindings_step.cpp); None for clip rules that it does not support."""
    first = settings[0]
    rule, program = first.rule, first.rule.clip.program()
    common = {"stochastic": rule.rounding == "stochastic", "observe_every": first.observe_every}
    if type(program) is Averaged and len(settings) == 2:
        threshold, keep, add = program
        return _native.GradientPlan(kind=_PAIR, threshold=threshold, keep=keep, add=add, for_tensor=for_tensor, **common)
    if type(program) is not Held or len(settings) > 1 or rule.per not in ("tensor", "K"):
        return None
    period, band, saturated = program
    if rule.per == "K" and not band:  # the clips per channel are held, not their ratio to max|g|
        return None
    kind = _RATIO if rule.per == "K" else _HELD
    return _native.GradientPlan(kind=kind, period=period, band=band, saturated=saturated, **common)
