# SPDX-License-Identifier: Apache-2.0
"""Compares an exported file, in onnxruntime, with the model: integers between layers, predictions, speed.

One integer that differs changes many in the layers after it, in any network whose activations are rounded. So the integers are
compared layer by layer: every layer of the file reads the integers (and float residuals) of our model, and its own integers
are compared with ours. Integers behind a float operator whose sums have no defined order (the first convolution, an average
pool) are counted apart, because no two runtimes compute them with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from byteback.export import detectors
from byteback.export.passes import number
from byteback.export.served import CALL
from byteback.nn.watching import Seen, recorded

EQUAL, TOP1, BOXES = 0.999, 0.995, 0.98  # the promises of a Q/DQ file
_EXACT_OPERATORS = {
    *("Add", "Mul", "Relu", "Clip", "Round", "Cast", "MaxPool", "Concat", "QuantizeLinear", "DequantizeLinear", "Identity"),
    *("Reshape", "Transpose", "Flatten", "Slice", "Split", "Pad", "Squeeze", "Unsqueeze"),
}
_INTEGER_LAYERS = ("Conv", "ConvInteger", "MatMul", "MatMulInteger")


@dataclass
class Integers:
    """How many integers were compared, and how many differ by one and by more."""

    compared: int = 0
    by_one: int = 0
    by_more: int = 0

    def add(self, ours: Any, theirs: Any) -> None:
        difference = np.abs(ours.astype(np.int32) - theirs.astype(np.int32))
        self.compared += difference.size
        self.by_one += int((difference == 1).sum())
        self.by_more += int((difference > 1).sum())

    @property
    def equal(self) -> float:
        """The share of equal integers."""
        return 1.0 - (self.by_one + self.by_more) / max(self.compared, 1)


@dataclass
class Check:
    """The result of `check`."""

    exact: bool
    images: int = 0
    layers: Integers = field(default_factory=Integers)
    behind_float: Integers = field(default_factory=Integers)
    worst: tuple[str, float] = ("", 1.0)  # the layer with the smallest share of equal integers
    same_top1: float = 1.0
    boxes: detectors.SameBoxes = field(default_factory=detectors.SameBoxes)
    largest_difference: float = 0.0  # of the output
    reach: float = 0.0  # largest magnitude of the output

    def failures(self) -> list[str]:
        """Returns a sentence for each promise that does not hold."""
        made, found = self.layers, []
        if self.exact and made.by_one + made.by_more:
            found.append(f"{made.by_one + made.by_more} of {made.compared} integers differ, but an exact file has all equal")
        if not self.exact and made.equal < EQUAL:
            found.append(f"{made.equal:.3%} of the integers are equal, less than {EQUAL:.1%}")
        if not self.exact and made.by_more:
            found.append(f"{made.by_more} of {made.compared} integers differ by more than one")
        if self.same_top1 < TOP1:
            found.append(f"{self.same_top1:.2%} of the predictions are the same, less than {TOP1:.1%}")
        if self.boxes.share < BOXES:
            found.append(f"{self.boxes.share:.2%} of the boxes are the same, less than {BOXES:.1%}")
        return found


def session(data: bytes, threads: int | None = None) -> Any:
    """Returns a session of onnxruntime for a file."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "check: needs onnxruntime, which is not installed. Install it: pip install 'byteback[export]'.", name="onnxruntime"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3
    # Without VNNI the int8 kernels of onnxruntime saturate sums of two products, unless they are asked for precision.
    options.add_session_config_entry("session.x64quantprecision", "0" if _has_vnni() else "1")
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _has_vnni() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return "vnni" in file.read()
    except OSError:
        return False


@torch.no_grad()
def check(model: nn.Module, data: bytes, batches: Sequence[Tensor], *, exact: bool, integers: int = 2) -> Check:
    """Compares a file with the model on batches of real inputs: integers on the first `integers` of them, the output on all.

    For a detector a batch is one image.
    """
    result, whole = Check(exact), session(data)
    per_layer: dict[str, Integers] = {}
    same, detects = 0, detectors.is_detector(model)
    forced = _Forced(data)
    for index, images in enumerate(batches):
        with recorded() as seen:
            ours = detectors.predict(model, images) if detects else (model(images),)
        theirs = whole.run(None, {whole.get_inputs()[0].name: images.numpy(force=True)})
        if detects:
            result.images += 1
            result.boxes.add(ours, theirs)
        else:
            result.images += len(images)
            same += int((ours[0].argmax(-1).numpy() == theirs[0].argmax(-1)).sum())
            result.largest_difference = max(result.largest_difference, float(np.abs(ours[0].numpy() - theirs[0]).max()))
            result.reach = max(result.reach, float(ours[0].abs().max()))
        if index < integers:
            for call, behind_float, own, other in forced.compared(images, seen):
                (result.behind_float if behind_float else result.layers).add(own, other)
                if not behind_float:
                    per_layer.setdefault(call, Integers()).add(own, other)
    if not detects:
        result.same_top1 = same / max(result.images, 1)
    if per_layer:
        name = min(per_layer, key=lambda call: per_layer[call].equal)
        result.worst = name.rsplit(":", 1)[0], per_layer[name].equal
    return result


class _Forced:
    """The file with its layers cut apart: integers and residuals are inputs, and the integers that it computes are outputs."""

    def __init__(self, data: bytes) -> None:
        import onnx
        import onnx_ir as ir

        self.model: Any = ir.from_proto(onnx.load_from_string(data))
        self.calls: dict[str, tuple[Any, Any]] = {}  # call -> the integers that it reads, its zero point
        self.residuals: dict[str, Any] = {}
        for node in self.model.graph:
            if CALL in node.metadata_props:
                call = node.metadata_props[CALL]
                self.calls[call] = _integers_of(node)
                added = _residual_after(node)
                if added is not None:
                    self.residuals[call] = added
        self.behind_float: dict[str, bool] = {}
        self.session: Any = None

    def _cut(self, seen: Seen) -> None:
        """Replaces what layers read by inputs of the graph, as far as our model has recorded it."""
        import onnx_ir as ir

        graph = self.model.graph
        self.inputs: dict[str, tuple[str, bool]] = {}  # name of the input -> call, whether it is a residual
        self.outputs: list[tuple[str, str, int]] = []  # name of the output, call, zero point
        done: set[int] = set()

        def cut(value: Any, call: str, readers: list[Any], is_residual: bool) -> None:
            name = f"{'residual' if is_residual else 'integers'} of {call}"
            given = ir.Value(name=name, type=value.type, shape=value.shape)
            graph.inputs.append(given)
            for reader, place in readers:
                reader.replace_input_with(place, given)
            self.inputs[name] = call, is_residual

        for call, (value, zero) in self.calls.items():
            if id(value) not in done and _key(call) in seen.inputs:
                done.add(id(value))
                cut(value, call, list(value.uses()), False)
                graph.outputs.append(value)
                self.outputs.append((value.name, call, zero))
        for call, (reader, place) in self.residuals.items():
            if _key(call) in seen.residuals:
                cut(reader.inputs[place], call, [(reader, place)], True)
        given = {id(value) for value in graph.inputs}
        self.behind_float = {call: not _is_exact(self.calls[call][0], given) for _, call, _ in self.outputs}
        self.session = session(ir.to_proto(self.model).SerializeToString())

    def compared(self, images: Tensor, seen: Seen) -> list[tuple[str, bool, Any, Any]]:
        """Returns (call, whether it is behind a float operator, our integers, those of the file)."""
        if self.session is None:
            self._cut(seen)
        zeros = {call: zero for _, call, zero in self.outputs}
        given = {"input": images.numpy(force=True)}
        for name, (call, is_residual) in self.inputs.items():
            value = (seen.residuals if is_residual else seen.inputs)[_key(call)].contiguous()
            if is_residual:
                given[name] = value.numpy()
            else:
                kind = {"tensor(uint8)": np.uint8, "tensor(int8)": np.int8}
                wanted = next(own.type for own in self.session.get_inputs() if own.name == name)
                given[name] = (value.to(torch.int32).numpy() + zeros[call]).astype(kind[wanted])
        known = {own.name for own in self.session.get_inputs()}
        made = self.session.run([name for name, *_ in self.outputs], {k: v for k, v in given.items() if k in known})
        rows = []
        for (_, call, zero), theirs in zip(self.outputs, made, strict=True):
            own = seen.inputs[_key(call)].contiguous().numpy()
            if own.shape != theirs.shape:  # behind the choice of boxes, of which there may be another number
                continue
            rows.append((call, self.behind_float[call], own, theirs.astype(np.int32) - zero))
        return rows


def _key(call: str) -> tuple[str, int]:
    name, _, slot = call.rpartition(":")
    return name, int(slot)


def _integers_of(node: Any) -> tuple[Any, int]:
    """Returns the integers that a layer reads, and their zero point."""
    value = node.inputs[0]
    if value.producer().op_type != "DequantizeLinear":
        return value, 0
    dequantize = value.producer()
    return dequantize.inputs[0], int(number(dequantize.inputs[2]))


def _residual_after(node: Any) -> tuple[Any, int] | None:
    """Returns the Add after a layer whose other operand is computed, and the place of that operand."""
    value = node.outputs[0]
    while len(uses := list(value.uses())) == 1:
        reader, place = uses[0]
        if reader.op_type not in ("Cast", "Mul", "Add"):
            return None
        if reader.op_type == "Add" and number(reader.inputs[1 - place]) is None:
            return reader, 1 - place
        value = reader.outputs[0]
    return None


def _is_exact(value: Any, given: set[int]) -> bool:
    """Whether a value is computed from integers of layers by operators with defined bits only."""
    node = value.producer()
    if node is None:
        return id(value) in given or number(value) is not None
    if CALL in node.metadata_props:
        return True
    if node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") == "nearest":
        return _is_exact(node.inputs[0], given)
    return node.op_type in _EXACT_OPERATORS and all(operand is None or _is_exact(operand, given) for operand in node.inputs)


def speed(run: Callable[[], Any], seconds: float = 1.0) -> float:
    """Returns the median time of a call in seconds."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
