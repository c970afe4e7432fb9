# SPDX-License-Identifier: Apache-2.0
"""Imports torchvision, whichever wheel of it is installed.

A torchvision wheel built for CUDA cannot load its C++ library next to CPU torch, and then `import torchvision` fails with
"operator torchvision::nms does not exist". Only in that case this module declares the operators that torchvision needs to be
imported. The two that detection models call, nms and roi_align, are implemented in detection_ops.py.

All other code in Byteback gets torchvision from `load()` and never imports it at the top of a file.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

from byteback import detection_ops

# qnms has no kernel: torchvision only needs its name during the import.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
}

# torch removes a declared operator when its Library object is freed.
_library: torch.library.Library | None = None


def load() -> ModuleType:
    """Imports torchvision. Declares the operators that its wheel lacks, only if that is needed. Can be called again."""
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
            "byteback.torchvision_compat.load: torchvision is not installed; the reference trainer needs it for "
            "networks, image transforms and data sets. Install it: pip install byteback[train]",
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
    """Removes submodules of a failed import. Python removes only the package, and the next import would use them."""
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]


def _declare_missing_operators() -> None:
    global _library
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    _library = _library or torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(_SCHEMAS[name])
    # torchvision registers its own shape function for nms, which is an error with an implicit composite kernel. Autograd must
    # differentiate the steps of roi_align, which only works with an implicit composite kernel.
    if "nms" in missing:
        _library.impl("nms", detection_ops.nms, "CompositeExplicitAutograd")
    if "roi_align" in missing:
        _library.impl("roi_align", detection_ops.roi_align, "CompositeImplicitAutograd")


def _let_torchvision_call_them() -> None:
    """Disables the check "C++ library is loaded" for the operators that we implement, and only for them.

    deform_conv2d and similar operators keep the clear error of torchvision. Without this, roi_align would use torch.compile,
    which needs a C++ compiler on the machine.
    """
    for name in ("boxes", "roi_align"):
        vars(sys.modules[f"torchvision.ops.{name}"]).update(_assert_has_ops=_true, _has_ops=_true)


def _true() -> bool:  # not a lambda, because the exporters of torchvision compile it with TorchScript
    return True
