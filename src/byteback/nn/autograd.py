# SPDX-License-Identifier: Apache-2.0
"""The three products of a layer, and the autograd function that combines them in every int8 layer.

                 forward                                             backward
  input  ─ quantize ───────► x_q ─┐                 grad_output ─┬─ quantize ─────────────────► g_q ─┐
                                  ├─ output ─► × scales          │                                   ├─ grad_input ─► × scales
  weight ─ quantize ───────► w_q ─┘                              │                        saved w_q ─┘
                                                                 └─ quantize, per channel ────► g_q' ┐
                                                                                                     ├─ grad_weight ─► × scales
                                                                                          saved x_q ─┘

    output = input ⋆ weight      grad_input = grad_output ⋆ᵀ weight      grad_weight = grad_output ⋆ input

The int8 products take QTensors. A product that the recipe keeps in float takes float tensors. Saved for backward are the int8
tensors and their scales, or the float operand of a product that the recipe keeps in float.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from byteback import ops
from byteback.nn.fused.sources import materialize, source_of
from byteback.nn.layers.weights import refuse_training
from byteback.nn.quantizing import Begun, quantize_gradient, quantize_input, weight_as_int8
from byteback.nn.undo import current_step, undo_step
from byteback.nn.watching import saw_input
from byteback.ops.contract import layout
from byteback.ops.types import for_grad_weight
from byteback.quantize import Gradient, NonFiniteError, QTensor, floats_of

if TYPE_CHECKING:
    from byteback.nn.layers.layer import Int8Layer


# ---- the products ------------------------------------------------------------------------------------------------------


class ConvProducts(NamedTuple):
    """The geometry of a convolution and its three products, in one to three dimensions."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def output(self, x: QTensor, w: QTensor) -> Tensor:
        return ops.conv_int8(x.values, x.scale, w.values, w.scale, *self)

    def normalized_output(
        self, x: QTensor, w: QTensor, norm: ops.BatchNorm, residual: ops.Residual, activation: str, **wants: Any
    ) -> tuple[Tensor, ops.Normalized]:
        """Returns the output, channels last, and its norm with batch statistics."""
        operands = x.values, x.scale, w.values, w.scale
        return ops.conv_normalize_batch(*operands, self, norm, residual, activation, **wants)

    def grad_input(self, g: QTensor, w: QTensor, input_size: list[int]) -> Tensor:
        return ops.conv_int8_grad_input(g.values, g.scale, w.values, w.scale, input_size, *self)

    def grad_weight(self, g: QTensor, x: QTensor, weight_size: list[int]) -> Tensor:
        return ops.conv_int8_grad_weight(for_grad_weight(g), g.scale, x.values, x.scale, weight_size, *self)

    def float_output(self, x: Tensor, w: Tensor) -> Tensor:
        conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
        return conv(x, w, None, self.stride, self.padding, self.dilation, self.groups)

    def float_grad_input(self, g: Tensor, w: Tensor, input_size: list[int]) -> Tensor:
        return self._aten(g, g.new_zeros(1).expand(input_size), w, 0)

    def float_grad_weight(self, g: Tensor, x: Tensor, weight_size: list[int]) -> Tensor:
        return self._aten(g, x, g.new_zeros(1).expand(weight_size), 1)

    def _aten(self, g: Tensor, x: Tensor, w: Tensor, which: int) -> Tensor:
        mask = [which == 0, which == 1, False]
        zeros = [0] * len(self.stride)
        return torch.ops.aten.convolution_backward(
            g, x, w, None, self.stride, self.padding, self.dilation, False, zeros, self.groups, mask
        )[which]


class TransposedProducts(NamedTuple):
    """The three products of a transposed convolution: those of a convolution from its output to its input.

    Its output is the grad_input of that convolution, its grad_input is the output, and in grad_weight the roles are exchanged.
    """

    convolution: ConvProducts
    size: tuple[int, ...]  # of the output's pixels

    def _output_size(self, x: Tensor, w: Tensor) -> list[int]:
        return [x.shape[0], w.shape[1] * self.convolution.groups, *self.size]

    def output(self, x: QTensor, w: QTensor) -> Tensor:
        return self.convolution.grad_input(x, w, self._output_size(x.values, w.values))

    def grad_input(self, g: QTensor, w: QTensor, input_size: list[int]) -> Tensor:
        return self.convolution.output(g, w)

    def grad_weight(self, g: QTensor, x: QTensor, weight_size: list[int]) -> Tensor:
        return self.convolution.grad_weight(x, g, weight_size)

    def float_output(self, x: Tensor, w: Tensor) -> Tensor:
        return self.convolution.float_grad_input(x, w, self._output_size(x, w))

    def float_grad_input(self, g: Tensor, w: Tensor, input_size: list[int]) -> Tensor:
        return self.convolution.float_output(g, w)

    def float_grad_weight(self, g: Tensor, x: Tensor, weight_size: list[int]) -> Tensor:
        return self.convolution.float_grad_weight(x, g, weight_size)


class LinearProducts(NamedTuple):
    """The three products of a linear layer: (M, C) input, (K, C) weight, (M, K) output."""

    def output(self, x: QTensor, w: QTensor) -> Tensor:
        return ops.matmul_int8(x.values, x.scale, w.values.t(), w.scale.t())

    def grad_input(self, g: QTensor, w: QTensor, input_size: list[int]) -> Tensor:
        return ops.matmul_int8(g.values, g.scale, w.values, w.scale)

    def grad_weight(self, g: QTensor, x: QTensor, weight_size: list[int]) -> Tensor:
        return ops.matmul_int8(g.values.t(), g.scale.t(), x.values, x.scale)

    def float_output(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    def float_grad_input(self, g: Tensor, w: Tensor, input_size: list[int]) -> Tensor:
        return g @ w

    def float_grad_weight(self, g: Tensor, x: Tensor, weight_size: list[int]) -> Tensor:
        return g.t() @ x


Products = ConvProducts | TransposedProducts | LinearProducts


# ---- the autograd function ---------------------------------------------------------------------------------------------


class Int8Product(Function):
    """output = input ⋆ weight. All three products are int8, except those that the recipe keeps in float."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: Int8Layer, products: Products, slot: int, with_grad: bool
    ) -> Tensor:
        # needs_input_grad is also true under no_grad, where there is no backward.
        for_input, for_weight = with_grad and ctx.needs_input_grad[0], with_grad and ctx.needs_input_grad[1]
        operands, kept = forward_operands(x, weight, layer, slot, for_input, for_weight)
        output = products.output(*operands) if operands is not None else products.float_output(materialize(x), weight)
        if source_of(x) is not None and not layout.is_channels_last(x) and not layout.is_channels_last(weight):
            output = output.contiguous()  # int8 from a block is always channels last, the model may be contiguous
        ctx.layer, ctx.products, ctx.slot, ctx.training = layer, products, slot, layer.training
        ctx.input_size, ctx.weight_size = list(x.shape), list(weight.shape)
        ctx.step = current_step()
        ctx.save_for_backward(*kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = backward_products(ctx, Operands(*ctx.saved_tensors), grad_output, ctx.needs_input_grad)
        return (*refuse_second(ctx.layer.int8_name, grad_output, grads), None, None, None, None)


class Operands(NamedTuple):
    """What forward saves for the two products of backward: int8 tensors, or float tensors for a product in float."""

    x_values: Tensor | None = None
    x_scale: Tensor | None = None
    w_values: Tensor | None = None
    w_scale: Tensor | None = None
    x: Tensor | None = None
    w: Tensor | None = None


def forward_operands(
    x: Tensor, weight: Tensor, layer: Int8Layer, slot: int, for_input: bool, for_weight: bool
) -> tuple[tuple[QTensor, QTensor] | None, Operands]:
    """Returns the operands of the output (None if it runs in float), and what its gradients will need."""
    int8_output, int8_input, int8_weight = (layer.runs_int8(product) for product in ("output", "grad_input", "grad_weight"))
    x_q = w_q = None
    if int8_output or (for_weight and int8_weight):
        x_q = quantize_input(layer, x, slot, for_weight and int8_weight)
        saw_input(layer, slot, x_q.values)
    if int8_output or (for_input and int8_input):
        w_q = weight_as_int8(layer, weight)
    operands = None
    if int8_output:
        assert x_q is not None and w_q is not None
        operands = x_q, w_q
    x_kept = (for_grad_weight(x_q), x_q.scale) if x_q is not None and for_weight and int8_weight else (None, None)
    w_kept = w_q if w_q is not None and for_input and int8_input else (None, None)
    x_float = materialize(x) if for_weight and not int8_weight else None
    w_float = weight if for_input and not int8_input else None
    return operands, Operands(x_kept[0], x_kept[1], w_kept[0], w_kept[1], x_float, w_float)


def output_operands(x: Tensor, weight: Tensor, layer: Int8Layer, slot: int) -> tuple[QTensor, QTensor]:
    """Returns the operands of the output if no gradient will be needed."""
    x_q = quantize_input(layer, x, slot, False)
    saw_input(layer, slot, x_q.values)
    return x_q, weight_as_int8(layer, weight)


def backward_products(
    ctx: Any, kept: Operands, gradient: Gradient, needs: tuple[bool, ...], begun: Begun | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns grad_input and grad_weight. ctx has layer, products, slot, training, step, input_size and weight_size."""
    layer, products = ctx.layer, ctx.products
    for_input, for_weight = needs[0], needs[1]
    if for_weight and layer.__dict__.get("int8_frozen") is not None:
        refuse_training(layer, "a gradient of its weight was requested")
    int8_input, int8_weight = for_input and kept.w_values is not None, for_weight and kept.x_values is not None
    try:
        g_q, g_q_for_weight = quantize_gradient(layer, gradient, ctx.slot, ctx.training, int8_input, int8_weight, begun)
    except NonFiniteError:
        undo_step(ctx.step)
        raise
    grad_input = grad_weight = None
    if g_q is not None:
        assert kept.w_values is not None and kept.w_scale is not None
        grad_input = products.grad_input(g_q, QTensor(kept.w_values, kept.w_scale), ctx.input_size)
    elif for_input:
        grad_input = products.float_grad_input(floats_of(gradient), kept.w, ctx.input_size)
    if g_q_for_weight is not None:
        assert kept.x_values is not None and kept.x_scale is not None
        grad_weight = products.grad_weight(g_q_for_weight, QTensor(kept.x_values, kept.x_scale), ctx.weight_size)
    elif for_weight:
        grad_weight = products.float_grad_weight(floats_of(gradient), kept.x, ctx.weight_size)
    return grad_input, grad_weight


def refuse_second(name: str, grad_output: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Returns the gradients. With create_graph=True, differentiating them again raises an error."""
    if not torch.is_grad_enabled():
        return grads
    # The anchor requires a gradient. grad_output may not: for a plain sum it is a constant. Both are in the graph, so that a
    # derivative by grad_output, as in torch.autograd.functional.jvp, raises the error too.
    anchor = torch.zeros((), device=grad_output.device, requires_grad=True)
    return _RefuseSecond.apply(name, anchor, grad_output, *grads)


class _RefuseSecond(Function):
    """An identity in forward that raises an error in backward, so that second derivatives are not silently zero."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, through: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            f"{ctx.name}: its gradient was differentiated a second time, but int8 gradients are rounded and have no "
            "derivative. Call backward without create_graph=True, or keep the layers that need it in float "
            "(prepare(..., keep_float=[...]) or byteback.enabled(model, False))."
        )
