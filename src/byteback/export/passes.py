# SPDX-License-Identifier: Apache-2.0
"""Changes the quantizers of an ONNX file, so that they saturate at ±127 as training does, and runtimes use int8 kernels.

    merge_equal        layers that read the same tensor with the same scale read the same integers
    drop_ceilings      a ReLU6 whose readers all saturate below 6 is a ReLU
    saturate           integers are uint8, because runtimes fuse layers only if all of them have one type. The zero point is 0
                       for a tensor that is never negative, so that runtimes compute the ReLU while they round, else 128. A Clip
                       on the integers then limits them to ±127.
    unsigned_inputs    the same type for the inputs of ConvInteger, if they are never negative

All of them keep every integer that a layer reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from byteback.ops.contract.limits import QMAX

_POSITIVE = {"Relu", "Sigmoid", "HardSigmoid", "Softmax"}
_OF_ALL_INPUTS = {"Add", "Mul", "Concat"}
_OF_THE_FIRST = {
    *("MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean", "Reshape", "Transpose", "Identity", "Flatten", "Squeeze"),
    *("Unsqueeze", "Slice", "Pad", "Split", "Round"),
}


def number(value: Any) -> Any:
    """Returns the array of a constant, or None."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def never_negative(value: Any) -> bool:
    """Whether no element of a value can be below 0, as far as its operators tell."""
    constant = number(value)
    if constant is not None:
        return bool((constant >= 0).all())
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "Clip" and len(node.inputs) > 1 and number(node.inputs[1]) is not None:
        return bool(number(node.inputs[1]) >= 0) or never_negative(node.inputs[0])
    if node.op_type in _OF_ALL_INPUTS:
        return all(never_negative(operand) for operand in node.inputs)
    return node.op_type in _POSITIVE or (node.op_type in _OF_THE_FIRST and never_negative(node.inputs[0]))


def _all(model: Any, *kinds: str) -> Iterator[Any]:
    return iter([node for node in model.graph if node.op_type in kinds])


def merge_equal(model: Any) -> None:
    """Merges the quantizers, and their parts, that compute the same."""
    known: dict[Any, Any] = {}
    for node in _all(model, "QuantizeLinear", "DequantizeLinear", "Mul", "Clip", "Round", "Cast"):
        operands = tuple(_identity(value) for value in node.inputs)
        key = node.op_type, operands, tuple(sorted((name, str(value.value)) for name, value in node.attributes.items()))
        if key in known:
            node.outputs[0].replace_all_uses_with(known[key].outputs[0])
            model.graph.remove(node, safe=True)
        else:
            known[key] = node


def _identity(value: Any) -> Any:
    constant = number(value)
    if constant is None or constant.size > 1:
        return id(value)
    return constant.tobytes(), str(constant.dtype)


def drop_ceilings(model: Any) -> None:
    """Replaces Clip(0, m) by Relu where every reader is a quantizer with a clip of at most m."""
    import onnx_ir as ir

    for node in _all(model, "Clip"):
        low, high = (number(value) for value in (*node.inputs[1:], None, None)[:2])
        if low is None or high is None or float(low) != 0.0:
            continue
        readers = [reader for reader, _ in node.outputs[0].uses()]
        scales = [number(reader.inputs[1]) for reader in readers if reader.op_type == "QuantizeLinear"]
        if len(scales) == len(readers) > 0 and all(scale is not None and scale * QMAX <= high for scale in scales):
            relu = ir.node("Relu", [node.inputs[0]], name=f"{node.name}_relu")
            relu.outputs[0].dtype, relu.outputs[0].shape = node.outputs[0].dtype, node.outputs[0].shape
            model.graph.insert_before(node, relu)
            node.outputs[0].replace_all_uses_with(relu.outputs[0])
            model.graph.remove(node, safe=True)


def _constant(graph: Any, name: str, array: Any) -> Any:
    import onnx_ir as ir

    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        made = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
        graph.register_initializer(made)
    return graph.initializers[name]


def saturate(model: Any) -> None:
    """Makes every QuantizeLinear write uint8, followed by a Clip to the range of training."""
    import onnx_ir as ir

    graph = model.graph
    for node in _all(model, "QuantizeLinear"):
        middle = 0 if never_negative(node.inputs[0]) else QMAX + 1
        zero = _constant(graph, f"zero_point_{middle}", np.array(middle, np.uint8))
        limits = [_constant(graph, f"limit_{limit}", np.array(limit, np.uint8)) for limit in (1, QMAX)]
        made = node.outputs[0]
        readers = list(made.uses())
        node.replace_input_with(2, zero)
        clip = ir.node("Clip", [made, limits[0]] if middle else [made, None, limits[1]], name=f"{node.name}_saturate")
        saturated = clip.outputs[0]
        made.dtype = saturated.dtype = zero.dtype
        saturated.shape, saturated.name = made.shape, f"{made.name}_saturated"
        graph.insert_after(node, clip)
        for reader, index in readers:
            reader.replace_input_with(index, saturated)
            if reader.op_type == "DequantizeLinear":
                reader.replace_input_with(2, zero)


def unsigned_inputs(model: Any) -> None:
    """Makes the integers of ConvInteger and MatMulInteger uint8 where they are never negative, as runtimes prefer it."""
    import onnx_ir as ir

    for node in _all(model, "Cast"):
        readers = {reader.op_type for reader, _ in node.outputs[0].uses()}
        if readers and readers <= {"ConvInteger", "MatMulInteger"} and never_negative(node.inputs[0]):
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.UINT8))
            node.outputs[0].dtype = ir.DataType.UINT8
