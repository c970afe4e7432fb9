# SPDX-License-Identifier: Apache-2.0
"""Byteback trains convolutional networks in int8, in the forward and in the backward pass.

byteback.prepare(model, byteback.UnifiedInt8())      # the convolutions now train in int8
byteback.scale_learning_rates(optimizer, model)      # learning-rate factors per layer, if the recipe has them
"""

import sys as _sys

from byteback import models
from byteback.convert import enabled, float_state_dict, freeze, prepare, restore, unfreeze
from byteback.export import export_onnx
from byteback.inspect import old_paths as _old_paths
from byteback.inspect.health import Health, RoleHealth, health
from byteback.inspect.memory import MemoryReport, memory, tune_malloc
from byteback.inspect.summary import LayerSummary, Summary, summary
from byteback.loading import load
from byteback.lr_scaling import LearningRateScaling, scale_learning_rates
from byteback.nn import (
    Int8Conv1d,
    Int8Conv2d,
    Int8Conv3d,
    Int8ConvTranspose1d,
    Int8ConvTranspose2d,
    Int8ConvTranspose3d,
    Int8Linear,
)
from byteback.ops.backends.paths import path
from byteback.quantize import Choice, ClipRule, MaxAbs, Memory, NonFiniteError, QTensor, TensorRule
from byteback.recipes import (
    DeviationCounteractive,
    DirectionSensitive,
    DistributionAdaptiveInt8,
    LearningRateRule,
    MagnitudeAware,
    PlainInt8,
    Recipe,
    UnifiedInt8,
)

__version__ = "0.1.0"

_sys.modules.update({f"{__name__}.report": _old_paths, f"{__name__}.memory": _old_paths})  # for pickles of earlier versions

__all__ = [
    # convert a model and inspect it
    "prepare",
    "restore",
    "enabled",
    "float_state_dict",
    "freeze",
    "unfreeze",
    "scale_learning_rates",
    "summary",
    "health",
    "memory",
    "models",
    "path",
    "tune_malloc",
    # weights of a run, and files for other runtimes
    "load",
    "export_onnx",
    # recipes
    "Recipe",
    "PlainInt8",
    "UnifiedInt8",
    "DistributionAdaptiveInt8",
    # the parts of a recipe
    "TensorRule",
    "ClipRule",
    "MaxAbs",
    "DirectionSensitive",
    "MagnitudeAware",
    "LearningRateRule",
    "DeviationCounteractive",
    "Choice",
    "Memory",
    # layers and values
    "Int8Conv1d",
    "Int8Conv2d",
    "Int8Conv3d",
    "Int8ConvTranspose1d",
    "Int8ConvTranspose2d",
    "Int8ConvTranspose3d",
    "Int8Linear",
    "QTensor",
    # return values and errors of the functions
    "Summary",
    "LayerSummary",
    "Health",
    "RoleHealth",
    "MemoryReport",
    "LearningRateScaling",
    "NonFiniteError",
]
