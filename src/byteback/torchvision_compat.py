# SPDX-License-Identifier: Apache-2.0
"""The one room that gets torchvision imported, whichever wheel of it is installed.

A torchvision wheel built for CUDA cannot load its C++ library next to CPU torch, and then
`import torchvision` dies with "operator torchvision::nms does not exist". Only in that case this room
declares the operators torchvision needs to be imported; the two that detection models call, nms and
roi_align, are those of detection_ops.py.

Everything else in Byteback gets torchvision from `load()`, never by importing it at the top of a file.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

from byteback import detection_ops

# qnms has no kernel: torchvision only asks for its name while it is being imported.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
}

# torch forgets a declared operator when its Library object is collected.
_library: torch.library.Library | None = None


def load() -> ModuleType:
    """Import torchvision, declaring the operators its wheel lacks if (and only if) it needs that; idempotent."""
    imported = sys.modules.get("torchvision")
    if imported is not None:
        return imported
    _forget_failed_import()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ImportError(
            "byteback.torchvision_compat.load: torchvision is not installed; the networks, image transforms and data "
            "sets of the reference trainer come from it. Install it: pip install byteback[train]",
            name="torchvision",
        ) from error
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    _forget_failed_import()
    _declare_missing_operators()
    torchvision = importlib.import_module("torchvision")
    _let_torchvision_call_them()
    return torchvision


def _forget_failed_import() -> None:
    """Python drops the failed package but keeps its submodules, which would mix into the next import."""
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]


def _declare_missing_operators() -> None:
    global _library
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    _library = _library or torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(_SCHEMAS[name])
    # torchvision registers its own shape function for nms, which an implicit composite kernel would forbid;
    # roi_align is to be differentiated through its steps, which only an implicit composite kernel allows.
    if "nms" in missing:
        _library.impl("nms", detection_ops.nms, "CompositeExplicitAutograd")
    if "roi_align" in missing:
        _library.impl("roi_align", detection_ops.roi_align, "CompositeImplicitAutograd")


def _let_torchvision_call_them() -> None:
    """Lift the "C++ library is loaded" guard where our operators stand in, and only there.

    deform_conv2d and its like keep torchvision's own clear error. Without this roi_align would go through
    torch.compile, which needs a C++ compiler on the machine.
    """
    for name in ("boxes", "roi_align"):
        vars(sys.modules[f"torchvision.ops.{name}"]).update(_assert_has_ops=_true, _has_ops=_true)


def _true() -> bool:  # not a lambda: torchvision's exporters compile it with TorchScript
    return True
