# SPDX-License-Identifier: Apache-2.0
"""Byteback trains convolutional networks in INT8, forward and back.

byteback.prepare(model, byteback.UnifiedInt8())      # the convolutions now train in int8
byteback.scale_learning_rates(optimizer, model)      # per-layer learning-rate factors, where the recipe has them
"""

from byteback import models
from byteback.convert import enabled, float_state_dict, prepare, restore
from byteback.lr_scaling import LearningRateScaling, scale_learning_rates
from byteback.memory import MemoryReport, memory, tune_malloc
from byteback.nn import Int8Conv1d, Int8Conv2d, Int8Conv3d, Int8Linear
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
from byteback.report import Health, LayerSummary, RoleHealth, Summary, health, summary
from byteback.serving import freeze, unfreeze

__version__ = "0.1.0"

__all__ = [
    # convert a model and look at it
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
    # recipes
    "Recipe",
    "PlainInt8",
    "UnifiedInt8",
    "DistributionAdaptiveInt8",
    # what recipes are made of
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
    "Int8Linear",
    "QTensor",
    # what the functions return and raise
    "Summary",
    "LayerSummary",
    "Health",
    "RoleHealth",
    "MemoryReport",
    "LearningRateScaling",
    "NonFiniteError",
]
