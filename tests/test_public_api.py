# SPDX-License-Identifier: Apache-2.0
"""The public names: all there, nothing more, documented, and enough for the README's training loop."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import byteback

SOURCE = Path(byteback.__file__).parents[1]
# A name that leaves this list is a breaking change; one that joins it is a promise. Both belong in CHANGELOG.md.
PUBLIC = {
    *("prepare", "restore", "enabled", "float_state_dict", "freeze", "unfreeze", "scale_learning_rates", "summary", "health"),
    *("memory", "models", "path", "tune_malloc", "load", "export_onnx"),
    *("Recipe", "PlainInt8", "UnifiedInt8", "DistributionAdaptiveInt8"),
    *("TensorRule", "ClipRule", "MaxAbs", "DirectionSensitive", "MagnitudeAware", "Choice", "Memory"),
    *("LearningRateRule", "DeviationCounteractive"),
    *("Int8Conv1d", "Int8Conv2d", "Int8Conv3d", "Int8Linear", "QTensor"),
    *("Int8ConvTranspose1d", "Int8ConvTranspose2d", "Int8ConvTranspose3d"),
    *("Summary", "LayerSummary", "Health", "RoleHealth", "MemoryReport", "LearningRateScaling", "NonFiniteError"),
}


def test_the_public_names_are_these() -> None:
    assert set(byteback.__all__) == PUBLIC
    assert len(byteback.__all__) == len(PUBLIC), "a name is listed twice"


def test_nothing_but_modules_is_reachable_without_being_public() -> None:
    stray = {
        name
        for name, value in vars(byteback).items()
        if not name.startswith("_") and name not in PUBLIC and not inspect.ismodule(value)
    }
    assert not stray


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_says_what_it_is(name: str) -> None:
    value = getattr(byteback, name)
    text = value.__doc__ or ""
    made_by_dataclass = dataclasses.is_dataclass(value) and text.startswith(f"{name}(")
    # A dataclass without one gets its signature instead.
    assert text.strip() and not made_by_dataclass, f"byteback.{name} has no docstring of its own"


@pytest.mark.parametrize("name", sorted(name for name in PUBLIC if inspect.isfunction(getattr(byteback, name))))
def test_every_public_function_is_typed(name: str) -> None:
    signature = inspect.signature(getattr(byteback, name))
    untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
    assert not untyped
    assert signature.return_annotation is not inspect.Signature.empty


def test_the_version_is_that_of_the_package_metadata() -> None:
    # Read as text: tomllib is younger than the oldest Python that Byteback supports.
    lines = (SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert f'version = "{byteback.__version__}"' in lines


def test_importing_byteback_needs_neither_torchvision_nor_rich() -> None:
    program = (
        "import sys\n"
        "for name in ('torchvision', 'rich', 'tyro', 'sklearn', 'onnx'): sys.modules[name] = None\n"
        "import byteback, torch\n"
        "model = byteback.prepare(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)))\n"
        "print(byteback.summary(model))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(SOURCE)}
    )
    assert done.returncode == 0, done.stderr
    assert "UnifiedInt8: 1 of 2 layers in int8" in done.stdout


def test_the_loop_of_the_readme_learns_and_goes_back_to_float() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 2)
    )
    byteback.prepare(model, byteback.UnifiedInt8())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    byteback.scale_learning_rates(optimizer, model)
    labels = torch.arange(16) % 2
    images = torch.randn(16, 1, 4, 4) + labels.reshape(-1, 1, 1, 1)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert "deviation" in str(byteback.health(model))
    assert type(byteback.restore(model)[2]) is nn.Conv2d
