# SPDX-License-Identifier: Apache-2.0
"""export_onnx: writes a prepared model to an ONNX file."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from byteback.convert.layers import int8_layers
from byteback.convert.restore import restore
from byteback.export import detectors, passes
from byteback.export.twin import Twin, twin_of

OPSETS = range(18, 26)
_LIMIT = 2**31 - 1  # of a protobuf
_OLDEST = "2.8"
_NEEDS = "export_onnx: needs {name}, which is not installed. Install it: pip install 'byteback[export]'."


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Tensor | None = None,
    *,
    exact: bool = False,
    opset: int = 18,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a prepared model in eval mode to an ONNX file, with the clips that training has tracked.

    The default file has QuantizeLinear and DequantizeLinear around its convolutions, which runtimes compute in int8. With
    exact=True it has ConvInteger and our float expressions, and computes the same integers as the model. `example` is an input
    of the model, of which the batch size may be any; a model of `byteback.load` knows its own. The file of a detector takes one
    image of the size of its example. docs/11-deploying.md.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise OSError(f"export_onnx: {path} could not be written: there is no folder {path.parent}. Create it.")
    _write(path, onnx_bytes(model, example, exact=exact, opset=opset, metadata=metadata))


def onnx_bytes(
    model: nn.Module,
    example: Tensor | None = None,
    *,
    exact: bool = False,
    opset: int = 18,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """Returns the contents of the file that `export_onnx` writes."""
    int8_layers(model, "export_onnx")
    example = _checked(model, example, opset)
    program = _translated(twin_of(model, exact), example, opset)
    if exact:
        passes.merge_equal(program.model)
        passes.unsigned_inputs(program.model)
    else:
        passes.drop_ceilings(program.model)
        passes.merge_equal(program.model)
        passes.saturate(program.model)
    return _serialized(program, {"byteback": json.dumps({"exact": exact, **_facts(model), **(metadata or {})})})


def float_bytes(model: nn.Module, example: Tensor | None = None, *, opset: int = 18) -> bytes:
    """Returns the same file for the float model, to compare with."""
    example = _checked(model, example, opset)
    return _serialized(_translated(Twin(restore(copy.deepcopy(model))), example, opset), {})


def _checked(model: nn.Module, example: Tensor | None, opset: int) -> Tensor:
    """Returns the example. Raises an error for a call that cannot succeed."""
    for name in ("onnx", "onnxscript"):
        try:
            __import__(name)
        except ImportError as error:
            raise ImportError(_NEEDS.format(name=name), name=name) from error
    if not hasattr(torch.onnx, "ops"):
        raise RuntimeError(f"export_onnx: needs torch {_OLDEST} or newer, but this is {torch.__version__}. Update torch.")
    if opset not in OPSETS:
        raise ValueError(
            f"export_onnx: opset is {opset}, but the operators of the file need one from {OPSETS[0]} to {OPSETS[-1]}. Choose "
            f"one of these; the default is {OPSETS[0]}."
        )
    if model.training:
        raise ValueError(
            "export_onnx: the model is in training mode, where its clips are those of the batch. Call model.eval()."
        )
    if example is None:
        example = getattr(getattr(model, "byteback", None), "example", None)
    if not isinstance(example, Tensor):
        raise ValueError(
            "export_onnx: example is missing. Give an input of the model, such as torch.zeros(2, 3, 224, 224); only models of "
            "byteback.load know their own."
        )
    if detectors.is_detector(model):
        detectors.check_example(model, example)
        return example
    return example if example.shape[0] > 1 else example.expand(2, *example.shape[1:])


def _translated(model: Twin, example: Tensor, opset: int) -> Any:
    """Translates a model. Raises an error of one sentence for a model that PyTorch cannot export."""
    if any(isinstance(module, (nn.LSTM, nn.GRU)) and module.training for module in model.modules()):
        raise ValueError("export_onnx: the model is in training mode. Call model.eval().")
    options: dict[str, Any] = {"dynamo": True, "opset_version": opset, "verbose": False, "input_names": ["input"]}
    if model.is_detector:
        options |= {"output_names": list(detectors.OUTPUTS)}
    else:
        options |= {"output_names": ["output"], "dynamic_shapes": ({0: torch.export.Dim("batch", min=1)},)}
    try:
        quiet = warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO())
        with quiet[0], quiet[1], torch.no_grad(), detectors.exportable():
            warnings.simplefilter("ignore")
            return torch.onnx.export(model.eval(), (example.contiguous(),), **options)
    except ValueError as error:
        if str(error).startswith("export_onnx: "):
            raise
        raise _unsupported(error) from error
    except Exception as error:  # torch.export and torch.onnx raise many kinds
        raise _unsupported(error) from error


def _unsupported(error: BaseException) -> ValueError:
    """Returns the error for a model that cannot be exported, with the deepest cause."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ValueError) and str(cause).startswith("export_onnx: "):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    return ValueError(
        f"export_onnx: PyTorch cannot export this model: {type(cause).__name__}: {lines[0][:300]}. Replace what it names, or "
        "use torch.export (docs/11-deploying.md)."
    )


def _facts(model: nn.Module) -> dict[str, Any]:
    """Returns what a model of `byteback.load` knows about its input and its classes."""
    about = getattr(model, "byteback", None)
    return about.as_data() if about is not None and hasattr(about, "as_data") else {}


def _serialized(program: Any, metadata: dict[str, str]) -> bytes:
    model = program.model
    model.producer_name = "byteback"
    model.metadata_props.update(metadata)
    for node in model.graph:
        for key in [key for key in node.metadata_props if not key.startswith("byteback")]:
            del node.metadata_props[key]  # stack traces, which have the paths of this machine
    proto = program.model_proto
    if proto.ByteSize() > _LIMIT:
        raise ValueError(
            f"export_onnx: the file would have {proto.ByteSize() / 2**30:.1f} GB, but ONNX files have at most 2 GB. Export a "
            "smaller model."
        )
    data: bytes = proto.SerializeToString()
    return data


def _write(path: Path, data: bytes) -> None:
    """Writes the file next to its place and renames it, so that there is never half of one."""
    fresh = path.with_name(path.name + ".writing")
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise OSError(f"export_onnx: {path} could not be written: {error.strerror or error}. Choose another place.") from error
