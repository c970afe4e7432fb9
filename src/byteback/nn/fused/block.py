# SPDX-License-Identifier: Apache-2.0
"""The fused block: conv → norm → (residual add) → activation as one autograd function, with int8 input and output.

    forward    x_q ⋆ w_q ─► y ─ channel statistics ─► a, b ─► act(a·y + b (+ r)) ─► int8 and/or float       (one pass)
    backward   g ─ sums per channel ─► p, q, r ─► p·g' + q·y + r ─► int8                                    (two passes)
               then grad_input and grad_weight as in autograd.py; g' is g through the activation's derivative

`Block` describes a block of a model, `Call` one call of its convolution, `Stages` the stages after that call so far.
ops/norm.py has the formulas. The float gradient of y is stored only if a clip rule has to read it. A clip that is held
for a period needs no reading. Magnitude-aware clips compute the gradient again while they read it (a third pass).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from byteback import ops
from byteback.nn.autograd import ConvProducts, Operands, backward_products, forward_operands, refuse_second
from byteback.nn.fused.activations import WITH_MASK
from byteback.nn.fused.norm import (
    batch_gradient,
    given_gradient,
    given_state,
    residual_of,
    scaled_gradient,
)
from byteback.nn.fused.prediction import predict, predict_in_float, predicts, predicts_in_float, reads_floats
from byteback.nn.fused.shared_gradients import SharedGradient, shared_gradient
from byteback.nn.fused.sources import (
    SHARED_RULE,
    LazyActivation,
    Poolable,
    Rounded,
    Source,
    attach_source,
    channels_last,
    floats_of,
    materialize,
)
from byteback.nn.fused.step import Gradients, backward_step, find_site, forward_step
from byteback.nn.quantizing import makes_pairs
from byteback.nn.undo import current_step
from byteback.nn.watching import saw_residual
from byteback.ops.activations import MONOTONE
from byteback.ops.backends.registry import backend_of
from byteback.ops.types import NormGradient, NormState, Wants
from byteback.quantize import BlockGradient, QTensor

if TYPE_CHECKING:
    from byteback.nn.layers.layer import Int8Layer
    from byteback.recipes import Recipe

Stage = Literal["conv", "norm", "add", "activation"]
_READERS = (
    *("feeds_conv", "feeds_dense", "feeds_other", "feeds_pool", "feeds_join", "join_feeds_conv", "join_feeds_other"),
    "feeds_add",
)


@dataclass(frozen=True)
class Block:
    """A convolution of a model, the stages that are computed with it, and what reads the result.

    Names are module names of the model. convert/graph finds the blocks. `prepare` binds each block to its convolution.
    """

    conv: str
    norm: str | None  # a BatchNorm or FrozenBatchNorm2d; without one the bias of the convolution is used
    adds: bool  # another tensor is added; whether its shape is the same is known only at the call
    activation: str  # its name in byteback.ops
    activation_module: str | None  # None if the activation is a function, or if there is none
    ends: Stage  # the last stage of the block; never "conv", because a convolution alone is not a block
    feeds_conv: bool  # another convolution reads the result, or may read it
    feeds_other: bool  # something else reads the result, or may read it, and needs a plain float tensor
    consumers: tuple[str, ...]  # short descriptions of what reads the result
    feeds_pool: bool = False  # a max-pool or a pool of single pixels, which reads floats from a LazyActivation
    feeds_join: bool = False  # a concatenation of channels, which is computed when it is read
    join_feeds_conv: bool = False  # a convolution reads that concatenation, or may read it
    join_feeds_other: bool = False
    feeds_add: bool = False  # another block reads the result as its residual
    feeds_dense: bool = False  # one of the convolutions is not depthwise
    # Set by `bound`. If one of these modules has a hook, the hook needs a tensor inside the block.
    swallowed: tuple[nn.Module, ...] = field(default=(), compare=False)

    def read_as(self, *others: Block) -> Block:
        """Returns this block with the readers of all `others` instead of its own."""
        readers: dict[str, Any] = {name: any(getattr(other, name) for other in others) for name in _READERS}
        return replace(self, **readers, consumers=tuple(dict.fromkeys(name for other in others for name in other.consumers)))

    def bound(self, modules: Sequence[nn.Module], recipe: Recipe) -> Block:
        """Returns the block with its modules. A residual is read as a float32 tensor, unless the recipe has a smaller form."""
        in_float32 = recipe.residual_memory == "float32" and recipe.stream == "float32"
        feeds_other = self.feeds_other or (self.feeds_add and in_float32)
        return replace(self, feeds_other=feeds_other, swallowed=tuple(modules))


class Call(NamedTuple):
    """One call of a convolution that starts a block."""

    x: Tensor
    layer: Int8Layer
    block: Block
    weight: Tensor  # at the call: the layer may have another one when the block is computed (functional_call)
    bias: Tensor | None
    products: ConvProducts
    slot: int
    size: torch.Size  # of the result
    strides: tuple[int, ...]  # of the float result, as PyTorch would choose them
    modes: tuple[bool, bool]  # autograd modes at the call
    versions: list[int]  # version counters of x, weight and bias at the call


class Stages(NamedTuple):
    """A call and the stages that were recorded so far."""

    call: Call
    norm: ops.BatchNorm | None = None
    by_batch: bool = False  # the norm uses batch statistics
    residual: Tensor | None = None
    activation: str = "none"
    reached: Stage = "conv"


def run_block(stages: Stages) -> Tensor:
    """Computes the stages that were recorded."""
    call, norm = stages.call, stages.norm
    gamma, beta = (norm.gamma, norm.beta) if norm is not None else (None, None)
    sources: list[Source] = []
    with_grad = torch.is_grad_enabled()
    if not with_grad and not call.layer.training:  # autograd would only cost time
        run = predict if predicts(stages) else predict_in_float if predicts_in_float(stages) else None
        if run is not None:
            output = run(call.x, call.weight, call.bias, stages.residual, stages, sources)
            return output if isinstance(output, LazyActivation) else attach_source(output, sources[0])
    output = FusedBlock.apply(call.x, call.weight, call.bias, gamma, beta, stages.residual, stages, with_grad, sources)
    return output if isinstance(output, LazyActivation) else attach_source(output, sources[0])


_transforms = torch._C._are_functorch_transforms_active


class FusedBlock(Function):
    """output = act(norm(x ⋆ weight + bias) + residual)."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Skips what Function.apply does for the transforms of functorch, under which `may_fuse` begins no block."""
        return super().apply(*args) if _transforms() else _plain_apply(*args)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        stages: Stages,
        with_grad: bool,
        sources: list[Source],
    ) -> Tensor:
        call, needs = stages.call, ctx.needs_input_grad
        backs = with_grad and any(needs[:6])
        if not backs and predicts(stages):
            return predict(x, weight, bias, residual, stages, sources)
        site = find_site(x, weight, stages, _wants, needs) if backs and stages.by_batch else None
        stepped = None if site is None else forward_step(site, x, weight, residual, stages)
        if stepped is not None:
            source = _stepped(ctx, site, stages, *stepped)
        else:
            source = _by_operators(ctx, x, weight, bias, residual, stages, backs, with_grad)
            ctx.site = None
        source.release()
        if backs:
            nodes = x.grad_fn, None if residual is None else residual.grad_fn
            ctx.shared = shared_gradient(nodes[0], x, ctx), shared_gradient(nodes[1], residual, ctx)
            ctx.from_blocks = type(nodes[0]) is _NODE, type(nodes[1]) is _NODE  # they read its gradient
            ctx.rounds = ctx.from_blocks[0] and _rounds_gradient(stages)
        source.join_floats = call.block.join_feeds_other
        sources.append(source)
        # An inference tensor has no version counter, so a write after which its int8 copy is wrong would go unnoticed.
        if source.output is None or not call.block.feeds_other or torch.is_inference_mode_enabled():
            return (Poolable if call.block.feeds_pool else LazyActivation)(source)
        output, source.output = source.output, None  # a reference cycle of source and tensor would keep both in memory
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True gradients belong to a graph, which would end where they wait.
        # Compiled autograd calls backward with another object, and traces ordinary tensors.
        if not torch.is_grad_enabled():
            return *_all_gradients(ctx, grad_output, ctx.shared, type(ctx) is _NODE), None, None, None
        with torch.no_grad():
            grads = _all_gradients(ctx, grad_output, (None, None), False)
        return *refuse_second(ctx.name, grad_output, grads), None, None, None


_NODE: Any = FusedBlock._backward_cls
"""The class of a block's node in autograd's graph, which is also that of its ctx."""
_plain_apply: Any = super(Function, FusedBlock).apply


# ---- forward ---------------------------------------------------------------------------------------------------------


def _by_operators(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stages: Stages,
    backs: bool,
    with_grad: bool,
) -> Source:
    """Computes the block operator by operator. Saves what backward needs."""
    call, needs = stages.call, ctx.needs_input_grad
    layer = call.layer
    operands, kept = forward_operands(x, weight, layer, call.slot, with_grad and needs[0], with_grad and needs[1])
    added = residual_of(residual, layer)
    saw_residual(layer, added)
    wants = _wants(stages, backs, needs[3])
    if stages.by_batch:
        product = operands or channels_last(call.products.float_output(materialize(x), weight))
        source, state, made = _by_batch(product, added, stages, wants)
        mask, y = made.mask, made.kept
    else:
        product = call.products.output(*operands) if operands else call.products.float_output(materialize(x), weight)
        state, y = given_state(stages.norm, bias, weight), None
        source = Source(channels_last(product), state.a, state.b, added, stages.activation, call.strides)
        mask = _write(source, wants)
    if backs:
        y = source.x if y is None and _backward_reads_y(stages, needs[3]) else y
        _save(ctx, stages, (*kept, mask, *state[:4], *_tensors(y)))
    source.join_int8 = call.block.join_feeds_conv and _own_clip(layer)
    return source


def _stepped(ctx: Any, site: Any, stages: Stages, x: QTensor, added: Tensor | None, made: list[Any]) -> Source:
    """Returns the source of a block from the results of its site. Saves what backward needs."""
    y, w, w_scale, a, b, mean, invstd, peak, values, scale, counts, output, mask, kept, step, centre = made
    call, block = stages.call, stages.call.block
    known = values is not None or (added is None and stages.activation in MONOTONE)
    source = Source(y, a, b, added, stages.activation, call.strides, peak if known else None)
    source.keep(peak, ops.Normalized(None if values is None else QTensor(values, scale, counts), output))
    source.join_int8 = block.join_feeds_conv and _own_clip(call.layer)
    stored = (y,) if kept is None else (kept,) if step is None else (kept, step, centre)
    saved = (x.values, x.scale, w, w_scale, None, None, mask, a, b, mean, invstd, *stored)
    _save(ctx, stages, saved)
    ctx.saved_at = site.places(saved)
    ctx.site, ctx.backend = site, backend_of(y)
    return source


def _is_pointwise(call: Call) -> bool:
    """Whether the convolution has one group and a kernel of one pixel. Its output is large beside its arithmetic.

    Elsewhere y stays float32 in a bfloat16 stream: squares of Winograd take longer to round on their way than the next pass
    saves, and a depthwise product takes as long as before. The rule is that of a shape, so that all paths have the same bits.
    """
    return call.products.groups == 1 and call.weight.shape[2:].numel() == 1


def _rounds_y(stages: Stages) -> bool:
    """Whether the output of the convolution is stored as bfloat16."""
    layer = stages.call.layer
    in_int8 = stages.by_batch and layer.runs_int8("output")
    return layer.recipe.stream == "bfloat16" and in_int8 and _is_pointwise(stages.call)


def _travels_rounded(stages: Stages) -> bool:
    """Whether the result is stored as bfloat16: of what reads floats, there are only other blocks, which add it."""
    block, recipe = stages.call.block, stages.call.layer.recipe
    only_added = not (block.feeds_other or block.feeds_pool or block.feeds_join)
    return recipe.stream == "bfloat16" and stages.by_batch and only_added and reads_floats(stages.call)


def _rounds_gradient(stages: Stages) -> bool:
    """Whether grad_input, with what waits for it, is stored as bfloat16, if another block has computed the input.

    The rule is that of `_is_pointwise`. With a stride, most of grad_input is 0 and written in other ways.
    """
    layer, products = stages.call.layer, stages.call.products
    in_int8 = stages.by_batch and layer.runs_int8("grad_input")
    return layer.recipe.stream == "bfloat16" and in_int8 and _is_pointwise(stages.call) and max(products.stride) == 1


def _wants(stages: Stages, backs: bool, needs_gamma: bool) -> Wants:
    """Returns what a block computes in its forward pass, for its readers and for backward."""
    layer, block = stages.call.layer, stages.call.block
    recipe = layer.recipe
    int8 = _own_clip(layer) and (block.feeds_conv or (block.feeds_add and recipe.residual_memory == "int8"))
    packed = int8 and block.feeds_dense and recipe.grad_weight
    floats, rounds = reads_floats(stages.call), _rounds_y(stages)
    dtypes = torch.bfloat16 if rounds else torch.float32, torch.bfloat16 if _travels_rounded(stages) else torch.float32
    if not backs:
        return Wants(int8, floats, False, None, *dtypes, packed)
    as_it_is = "bfloat16" if rounds else "float32"
    keep = recipe.norm_memory if stages.by_batch and recipe.norm_memory not in ("float32", as_it_is) else None
    masks = stages.residual is not None or keep is not None or not _backward_reads_y(stages, needs_gamma)
    return Wants(int8, floats, masks and stages.activation in WITH_MASK, keep, *dtypes, packed)


def _own_clip(layer: Int8Layer) -> bool:
    """Whether the clip of a result is its maximum, which is known now. In eval it is the clip of the reader."""
    return layer.training and layer.recipe.input == SHARED_RULE


def _backward_reads_y(stages: Stages, needs_gamma: bool) -> bool:
    """Whether backward reads the output of the convolution: for a norm and for smooth activations, else only a mask."""
    return stages.by_batch or needs_gamma or stages.activation not in MONOTONE


def _by_batch(
    product: Tensor | tuple[QTensor, QTensor], added: ops.Residual, stages: Stages, wants: Wants
) -> tuple[Source, NormState, ops.Normalized]:
    """Computes the norm with batch statistics and what is wanted. Returns the source, the norm and the results of the pass.

    `product` is the output of the convolution, or its operands.
    """
    call, norm, activation = stages.call, stages.norm, stages.activation
    assert norm is not None
    want_int8, want_float, want_mask, keep, y_dtype, dtype, packed = wants
    named: dict[str, Any] = {"want_int8": want_int8, "want_float": want_float, "want_mask": want_mask, "keep": keep}
    named |= {"output_dtype": dtype, "want_packed": packed}
    if isinstance(product, Tensor):
        y, made = product, ops.normalize_batch(product, norm, added, activation, **named)
    else:
        named["y_dtype"] = y_dtype
        y, made = call.products.normalized_output(*product, norm, added, activation, **named)
    state = made.norm
    assert state is not None
    source = Source(y, state.a, state.b, added, activation, call.strides, state.peak)
    source.keep(state.peak, made)
    return source, state, made


def _write(source: Source, wants: Wants) -> Tensor | None:
    """Computes in one pass what will be read. Returns the mask that backward needs."""
    if not (wants.mask or wants.float or wants.int8):
        return None
    return source.write(source.clip() if wants.int8 else None, wants.float, wants.mask)


def _save(ctx: Any, stages: Stages, tensors: tuple[Tensor | None, ...]) -> None:
    """Saves for backward what `_gradients` and backward_products read."""
    call, norm = stages.call, stages.norm
    layer = call.layer
    ctx.layer, ctx.products, ctx.slot, ctx.training = layer, call.products, call.slot, layer.training
    ctx.name = layer.int8_name  # restore() removes the name, and may be called before backward
    ctx.has_norm, ctx.by_batch, ctx.norm_eps = norm is not None, stages.by_batch, 0.0 if norm is None else norm.eps
    ctx.activation, ctx.step = stages.activation, current_step()
    ctx.input_size, ctx.weight_size = call.x.shape, call.weight.shape
    ctx.save_for_backward(*tensors)


def _tensors(kept: Any) -> tuple[Tensor, ...]:
    """Returns the saved form of y as tensors that autograd can save."""
    return () if kept is None else (kept,) if isinstance(kept, Tensor) else tuple(kept)


# ---- backward --------------------------------------------------------------------------------------------------------


def _all_gradients(ctx: Any, grad_output: Tensor, shared: Any, rounded: bool) -> tuple[Tensor | None, ...]:
    """Returns what autograd gets. `rounded`: a gradient in bfloat16 may stay so for the block that reads it."""
    of_x, *others, of_residual = _gradients(ctx, grad_output, *shared)
    to_x, to_residual = ctx.from_blocks
    return _for_autograd(of_x, rounded and to_x), *others, _for_autograd(of_residual, rounded and to_residual)


def _gradients(
    ctx: Any, grad_output: Tensor, of_input: SharedGradient | None, of_residual: SharedGradient | None
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the inputs of the block. Those of x and of the residual may wait for other readers."""
    saved = ctx.saved_tensors  # read once, because unpacking may recompute the tensors
    g, needs = floats_of(grad_output), ctx.needs_input_grad
    mask = saved[6] if of_residual is not None and of_residual.will_wait(ctx) else None  # else gm is written
    masks = needs[5] and ctx.activation != "none" and mask is None
    waiting = None if of_input is None else of_input.take()
    stepped = None if ctx.site is None else backward_step(ctx, saved, g, masks, waiting)
    if stepped is not None and stepped.products is not None:
        norm, (grad_input, grad_weight), waiting = stepped.norm, stepped.products, stepped.waiting
    else:
        norm, (grad_input, grad_weight) = _gradients_by_operators(ctx, saved, g, masks, stepped)
    # First x, then the residual: in autograd's order also if they are the same tensor.
    if grad_input is not None:
        if waiting is not None:
            grad_input = ops.add_waiting(grad_input, *waiting)
        if ctx.rounds and grad_input.dtype is torch.float32:
            grad_input = _rounded(grad_input)
        if of_input is not None:
            grad_input = of_input.give(ctx, grad_input)
    grad_residual: Tensor | None = None
    if needs[5]:
        grad_residual = g if norm.masked is None else norm.masked
        if of_residual is not None:
            grad_residual = _residual_gradient(of_residual, ctx, grad_residual, mask)
    wanted = zip((norm.bias, norm.gamma, norm.beta), needs[2:5], strict=True)
    return grad_input, grad_weight, *(grad if needed else None for grad, needed in wanted), grad_residual


def _residual_gradient(shared: SharedGradient, ctx: Any, grad: Tensor, mask: Tensor | None) -> Tensor | None:
    """Adds the gradient of the residual to what waits for it. Returns the sum if no other reader will come."""
    waiting = shared.take()
    if waiting is None:
        return shared.give(ctx, grad, mask)
    if mask is not None:  # the block adds its own input, whose gradient has come in between
        grad = ops.add_waiting(torch.zeros_like(grad, dtype=torch.float32), grad, mask)
    return shared.give(ctx, ops.add_waiting(grad.float(), *waiting))


def _rounded(x: Tensor) -> Tensor:
    rounded = ops.pack_norm(x, None, None, None, "bfloat16")
    assert isinstance(rounded, Tensor)
    return rounded


def _for_autograd(grad: Tensor | None, to_block: bool) -> Tensor | None:
    """Returns a gradient as a float32 tensor. If a block will read one in bfloat16, it has no storage until somebody looks."""
    if grad is None or grad.dtype is torch.float32:
        return grad
    return LazyActivation(Rounded(grad)) if to_block else grad.float()


def _gradients_by_operators(
    ctx: Any, saved: tuple[Tensor, ...], g: Tensor, masks: bool, stepped: Gradients | None
) -> tuple[NormGradient, tuple[Tensor | None, Tensor | None]]:
    """Returns the gradient of the norm and those of the products. `stepped` has what a site has computed already."""
    kept, state, stored = Operands(*saved[:6]), NormState(*saved[7:11]), saved[11:]
    mask: Tensor | None = saved[6]
    # If y was not saved, its factors are 0, so any tensor of its shape can be passed.
    y: Any = stored if len(stored) > 1 else stored[0] if stored else g
    norm = _norm_gradient(ctx, g, y, state, mask, masks) if stepped is None else stepped.norm
    activation = ctx.activation
    if norm.masked is not None:
        g, mask, activation = norm.masked, None, "none"
    parts = ops.GradientParts(g, y, state.a, state.b, mask, activation, state.a, norm.q, norm.r)
    begun = None if stepped is None else stepped.begun
    return norm, backward_products(ctx, kept, BlockGradient(parts, norm.sums), ctx.needs_input_grad, begun)


def _norm_gradient(ctx: Any, g: Tensor, y: Any, state: NormState, mask: Tensor | None, masks: bool) -> NormGradient:
    """Returns the coefficients of the gradient of y and the gradients of the parameters. With `masks` also gm."""
    activation, needs, pairs = ctx.activation, ctx.needs_input_grad, makes_pairs(ctx.layer)
    # For two copies the gradient is read twice more, so the derivative of a smooth activation is computed once and stored.
    masks = masks or (pairs and activation in ops.SMOOTH)
    if ctx.by_batch:
        wants = {"want_bias": needs[2], "want_masked": masks, "want_sums": pairs}
        return batch_gradient(g, y, state, mask, activation, ctx.norm_eps, **wants)
    if any(needs[2:5]) or masks or pairs:
        return given_gradient(g, y, state, mask, activation, has_norm=ctx.has_norm, want_masked=masks, want_sums=pairs)
    return scaled_gradient(state)
