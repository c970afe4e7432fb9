# SPDX-License-Identifier: Apache-2.0
"""A training step on the GPU's backend with meta tensors: nothing looks at a value, and every product and pass is a kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from byteback.ops.backends import gpu, reference, registry, triton
from byteback.ops.backends.triton import self_check, tiles
from byteback.ops.backends.triton.search import _COARSE, _FINE, _NEAR
from byteback.ops.products import explain
from byteback.recipes import direction_search
from gpu_check.recorded import recording, train
from gpu_check.report import PRODUCTS, RECIPES

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("recipe", [pytest.param("plain-int8", marks=pytest.mark.slow), *RECIPES])
def test_a_step_looks_at_no_value(recipe: str) -> None:
    """On meta tensors every look raises an error."""
    with recording() as launches:
        train(recipe, batch=4, pixels=32)
    names = {made.name for made in launches}
    assert {"conv_output.conv_output", "conv_grad_input.conv_grad_input", "conv_grad_weight.grad_weight"} <= names
    assert {"depthwise.output", "depthwise.grad_input", "depthwise.grad_weight", "pool.forward", "pool.backward"} <= names
    assert {"norm.normalize", "norm_grad.gradient", "norm_grad.sums", "ledger.write", "quantize.quantize"} <= names


def test_a_step_on_turing_looks_at_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has no int8 products there. Everything else runs in its kernels."""
    monkeypatch.setattr(tiles, "multiplies_int8", lambda _: False)
    with recording() as launches:
        train("unified-int8", batch=4, pixels=32)
    names = {made.name for made in launches}
    assert not names & {*PRODUCTS, "conv_grad_weight.pack"}
    assert {"conv_grad_weight.finish", "depthwise.output", "norm.normalize", "quantize.quantize"} <= names


def test_the_grids_are_those_of_the_recipe() -> None:
    found = _COARSE, _FINE, _NEAR
    assert found == (direction_search._COARSE, direction_search._FINE, direction_search._NEAR)


def test_the_products_compile_to_int8_tensor_cores_without_spills() -> None:
    """In a process of its own, as this one interprets kernels. `make gpu-check` does all targets."""
    command = [sys.executable, "-m", "gpu_check", "--products", "--compile-only", "--targets", "sm_80"]
    made = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


def test_a_device_is_checked_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks before that of the moments pass."""
    monkeypatch.setattr(triton, "moments", lambda x: tuple(part + 1 for part in reference.moments(x)))
    assert "moments gives other bits" in self_check.self_check(torch.device("cpu"))


class Properties:
    def __init__(self, major: int, minor: int) -> None:
        self.major, self.minor, self.gcnArchName = major, minor, "gfx1100:sramecc-"


@pytest.mark.parametrize(
    ("major", "hip", "reason"),
    [(7, None, "compute capability is 7.0"), (8, None, ""), (9, "6.4", "this GPU is gfx1100")],
)
def test_gpus_that_cannot_run_the_kernels_are_named(
    major: int, hip: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties(major, 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    found = gpu.why_not(torch.device("cuda", 0))
    assert reason in found and bool(reason) == bool(found)
    if reason:
        gpu.backend.cache_clear()
        with pytest.warns(UserWarning, match="runs on the reference"):
            assert gpu.backend(torch.device("cuda", 0)) is reference
        gpu.backend.cache_clear()


def test_other_devices_run_on_the_reference() -> None:
    assert registry.backend_on(torch.device("xla", 0)) is reference


def test_the_tile_of_a_product_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = [128, 64, 56, 56], [64, 64, 3, 3], [128, 64, 56, 56], ([1, 1], [1, 1], [1, 1], 1)
    monkeypatch.setitem(registry._BY_DEVICE, "meta", triton)
    for kind, reason in (("output", "enough tiles for 108 multi"), ("grad_input", "enough tiles"), ("grad_weight", "packed")):
        assert reason in explain(kind, *layer, "meta")
    monkeypatch.setattr(tiles, "multiplies_int8", lambda _: False)
    assert "Triton has no int8 products for this GPU" in explain("output", *layer, "meta")
    long = [1, 2**17, 1, 1], [1, 2**17, 3, 3], [1, 1, 1, 1], ([1, 1], [1, 1], [1, 1], 1)
    assert "int32 may not hold" in explain("output", *long, "meta")
