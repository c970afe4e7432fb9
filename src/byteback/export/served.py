# SPDX-License-Identifier: Apache-2.0
"""The modules that stand for int8 layers while a model is exported. Their forward records operators of ONNX.

    Qdq      QuantizeLinear and DequantizeLinear around a float operator: the runtime chooses int8 kernels
    Exact    ConvInteger or MatMulInteger, with our float expressions before and after it
    Folded   stands for a norm that is computed by the layer before it

A layer computes a · (x_q ⋆ w_q) · scale + b, as a fused block does (nn/fused/block.py); what follows stays in the model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from byteback.ops.backends.reference.statistics import inverse_scale, is_live
from byteback.ops.contract.limits import QMAX
from byteback.ops.contract.rounded_once import divided_by
from byteback.quantize import QTensor

CALL = "byteback.call"
"""The name of the metadata of an operator that says which call of which layer it computes, such as "layer1.0.conv1:0"."""
_LARGEST_BIAS = 2.0**30  # of an int32, with a margin
_NOTHING = 2.0**100  # the scale of an input whose clip is zero: every value becomes 0


class Constants(NamedTuple):
    """What a layer computes with.

    clips   of the input, one for each call of the layer within a forward; None for a call without a tracked clip
    a, b    the norm after it, of shape (K,): a is None without a norm, b without a norm and without a bias
    """

    name: str
    weight: QTensor
    clips: list[Tensor | None]
    a: Tensor | None
    b: Tensor | None


class Folded(nn.Module):
    """In the place of a norm that the convolution before it computes. Runs what the norm does after that, if anything."""

    def __init__(self, name: str, after: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.expected, self.after = name, 0, after

    def forward(self, x: Tensor) -> Tensor:
        if self.expected == 0:
            raise ValueError(
                f"export_onnx: the norm {self.name} follows a convolution in one place and is called alone in another, which "
                "cannot be exported. Use two norms, or prepare the model with fuse=False."
            )
        self.expected -= 1
        return x if self.after is None else self.after(x)


class Served(nn.Module):
    """A layer in the exported graph. It counts its calls, because every call has its own clip."""

    def __init__(self, constants: Constants, layer: Any, norm: Folded | None) -> None:
        super().__init__()
        self.name, self.clips, self.calls = constants.name, constants.clips, 0
        self.norm = (norm,)  # in a tuple, so that it is not a child
        self.layer = (layer,)

    def begin(self) -> int:
        """Counts a call and returns its number."""
        slot = min(self.calls, len(self.clips) - 1)
        self.calls += 1
        if self.norm[0] is not None:
            self.norm[0].expected += 1
        if self.clips[slot] is None:
            call = f" in call {slot + 1}" if slot else ""
            raise ValueError(
                f"export_onnx: {self.name} has no tracked clip for its input{call}, so the file would have no scale for it. "
                "Train the model in int8 first, or load a trained checkpoint."
            )
        return slot

    def forward(self, x: Tensor) -> Tensor:
        """Records the layer."""
        slot = self.begin()
        layer = self.layer[0]
        if isinstance(layer, nn.Linear):
            return self.linear(x, slot, [*x.shape[:-1], layer.out_features])
        x, products, batched = layer._products(x)
        if not batched:
            raise ValueError(
                f"export_onnx: {self.name} is called with one sample without a batch axis, which cannot be exported. Add the "
                "axis in the model."
            )
        kernel = layer.weight.shape[2:]
        axes = zip(x.shape[2:], kernel, products.stride, products.padding, products.dilation, strict=True)
        sizes = [(size + 2 * pad - apart * (reach - 1) - 1) // step + 1 for size, reach, step, pad, apart in axes]
        attributes = {
            **{"strides": list(products.stride), "pads": [*products.padding, *products.padding]},
            **{"dilations": list(products.dilation), "group": products.groups, "kernel_shape": list(kernel)},
        }
        return self.conv(x, slot, [x.shape[0], layer.out_channels, *sizes], attributes)

    def conv(self, x: Tensor, slot: int, size: list[Any], attributes: dict[str, Any]) -> Tensor:
        """Records a convolution."""
        raise NotImplementedError

    def linear(self, x: Tensor, slot: int, size: list[Any]) -> Tensor:
        """Records a matrix product."""
        raise NotImplementedError

    def call(self, slot: int) -> str:
        """Returns the name of a call."""
        return f"{self.name}:{slot}"

    def keep(self, name: str, value: Tensor) -> None:
        """Stores a constant."""
        self.register_buffer(name, value.detach().clone().contiguous())


def _record(kind: str, inputs: list[Any], size: Any, dtype: torch.dtype, of: str = "", **attributes: Any) -> Tensor:
    """Records an operator of ONNX, and the call of a layer that it computes. Its size and dtype are not inferred."""
    props = {CALL: of} if of else None
    return torch.onnx.ops.symbolic(kind, inputs, attributes, dtype=dtype, shape=list(size), metadata_props=props)


# ---- QuantizeLinear and DequantizeLinear -----------------------------------------------------------------------------


class Qdq(Served):
    """A layer in Q/DQ form. The norm is in the scales of the weight and in an int32 bias, as runtimes expect it."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, constants: Constants, layer: Any, norm: Folded | None) -> None:
        super().__init__(constants, layer, norm)
        scales = [_input_scale(clip) if clip is not None else None for clip in constants.clips]
        smallest = min((float(scale) for scale in scales if scale is not None), default=1.0)
        values, factors, bias = _folded(constants, smallest)
        self.is_linear = isinstance(layer, nn.Linear)
        self.keep("weight", values.t() if self.is_linear else values)
        self.keep("weight_scale", factors)
        self.keep("zero", torch.zeros((), dtype=torch.int8))
        self.has_bias = bias is not None
        for slot, scale in enumerate(scales):
            if scale is not None:
                self.keep(f"input_scale_{slot}", scale)
                if bias is not None:
                    self.keep(f"bias_scale_{slot}", scale * factors)
                    self.keep(f"bias_{slot}", (bias / (scale * factors).double()).round().to(torch.int32))

    def _input(self, x: Tensor, slot: int) -> Tensor:
        scale = getattr(self, f"input_scale_{slot}")
        q = _record("QuantizeLinear", [x, scale, self.zero], x.shape, torch.int8)
        return _record("DequantizeLinear", [q, scale, self.zero], x.shape, torch.float32)

    def _bias(self, slot: int) -> Tensor | None:
        if not self.has_bias:
            return None
        operands = [getattr(self, f"bias_{slot}"), getattr(self, f"bias_scale_{slot}")]
        return _record("DequantizeLinear", operands, self.weight_scale.shape, torch.float32, axis=0)

    def conv(self, x: Tensor, slot: int, size: list[Any], attributes: dict[str, Any]) -> Tensor:
        w = _record("DequantizeLinear", [self.weight, self.weight_scale], self.weight.shape, torch.float32, axis=0)
        return _record("Conv", [self._input(x, slot), w, self._bias(slot)], size, torch.float32, self.call(slot), **attributes)

    def linear(self, x: Tensor, slot: int, size: list[Any]) -> Tensor:
        w = _record("DequantizeLinear", [self.weight, self.weight_scale], self.weight.shape, torch.float32, axis=1)
        y = _record("MatMul", [self._input(x, slot), w], size, torch.float32, self.call(slot))
        bias = self._bias(slot)
        return y if bias is None else y + bias


def _input_scale(clip: Tensor) -> Tensor:
    """Returns clip / 127, rounded once."""
    clip = clip.detach().reshape(()).float()
    return divided_by(clip, QMAX) if bool(is_live(clip)) else clip.new_full((), _NOTHING)


def _folded(constants: Constants, input_scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the integers of the weight, their scales |a · scale| (K,), and the bias (K,) in float64.

    A scale must be positive, so a negative factor changes the sign of the integers. Where the factor is so small that the bias
    would not fit into an int32, the scale is larger and the integers, which have hardly any effect, are rounded again.
    """
    values, scale = constants.weight.values, constants.weight.scale
    channels, rest = values.shape[0], (1,) * (values.dim() - 1)
    factors = scale.reshape(-1).double().expand(channels)
    factors = factors if constants.a is None else factors * constants.a.detach().double()
    bias = None if constants.b is None else constants.b.detach().double()
    least = torch.full_like(factors, 2.0**-100)
    if bias is not None:
        least = torch.maximum(least, bias.abs() / (input_scale * _LARGEST_BIAS))
    scales = torch.maximum(factors.abs(), least)
    ratio = torch.where(factors.abs() < least, factors / scales, factors.sign())
    integers = (values.double() * ratio.reshape(-1, *rest)).round().to(torch.int8)
    return integers, scales.float(), bias


# ---- ConvInteger and MatMulInteger -----------------------------------------------------------------------------------


class Exact(Served):
    """A layer with integer operators. Every expression is ours, in the same order and rounded as often."""

    a: Tensor
    b: Tensor

    def __init__(self, constants: Constants, layer: Any, norm: Folded | None) -> None:
        super().__init__(constants, layer, norm)
        values, scale = constants.weight.values, constants.weight.scale
        self.is_linear = isinstance(layer, nn.Linear)
        self.keep("weight", values.t() if self.is_linear else values)
        self.column = (1, -1) if self.is_linear else (1, -1, *(1,) * (values.dim() - 2))
        for name in ("a", "b"):
            vector = getattr(constants, name)
            self.keep(name, torch.zeros(0) if vector is None else vector.float().reshape(self.column))
        for slot, clip in enumerate(constants.clips):
            if clip is not None:
                clip = clip.detach().reshape(()).float()
                live = bool(is_live(clip))
                self.keep(f"inverse_{slot}", inverse_scale(clip) if live else torch.zeros(()))
                input_scale = divided_by(clip, QMAX) if live else torch.ones(())
                self.keep(f"scale_{slot}", (input_scale * scale).reshape(self.column if scale.numel() > 1 else ()))

    def _input(self, x: Tensor, slot: int) -> Tensor:
        return (x * getattr(self, f"inverse_{slot}")).clamp(-QMAX, QMAX).round().to(torch.int8)

    def _output(self, acc: Tensor, slot: int) -> Tensor:
        y = acc.to(torch.float32) * getattr(self, f"scale_{slot}")
        y = y * self.a if self.a.numel() else y
        return y + self.b if self.b.numel() else y

    def conv(self, x: Tensor, slot: int, size: list[Any], attributes: dict[str, Any]) -> Tensor:
        acc = _record("ConvInteger", [self._input(x, slot), self.weight], size, torch.int32, self.call(slot), **attributes)
        return self._output(acc, slot)

    def linear(self, x: Tensor, slot: int, size: list[Any]) -> Tensor:
        acc = _record("MatMulInteger", [self._input(x, slot), self.weight], size, torch.int32, self.call(slot))
        return self._output(acc, slot)


KINDS: dict[bool, type[Served]] = {False: Qdq, True: Exact}
"""By whether the file is exact."""
