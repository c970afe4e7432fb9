# SPDX-License-Identifier: Apache-2.0
"""load: a trained network from the files of a run.

The trainer, which knows how to build networks by name, is above the public package and needs packages that the core does not.
So it is imported by its name in the call.
"""

from __future__ import annotations

import importlib
import os

from torch import nn


def load(path: str | os.PathLike[str], precision: str = "int8") -> nn.Module:
    """Returns the trained network of a run in eval mode, with its weights: in int8 as it was trained, or in "float".

    `path` is best.safetensors, a checkpoint, or the folder of a run or of a member. `model.byteback.classes` has the names of
    the classes, and `model.byteback.preprocess(image)` makes the input of an image file. docs/11-deploying.md.
    """
    try:
        saved = importlib.import_module("byteback.train.saved")
    except ImportError as error:
        raise ImportError(
            f"load: needs {error.name}, which is not installed. Install it: pip install 'byteback[train]'.", name=error.name
        ) from error
    model: nn.Module = saved.load(path, precision)
    return model
