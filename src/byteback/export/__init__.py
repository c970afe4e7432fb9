# SPDX-License-Identifier: Apache-2.0
"""Exports a prepared model to ONNX.

onnx_file.py   export_onnx: writes the file
twin.py        the copy of the model that is exported
served.py      the modules in it that record the operators of int8 layers
detectors.py   what is different for torchvision's detectors
passes.py      changes of the graph, so that integers saturate as in training and runtimes use int8 kernels
comparing.py   compares a file with the model in onnxruntime
"""

from byteback.export.comparing import Check, check
from byteback.export.onnx_file import export_onnx, float_bytes, onnx_bytes

__all__ = ["Check", "check", "export_onnx", "float_bytes", "onnx_bytes"]
