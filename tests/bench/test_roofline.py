# SPDX-License-Identifier: Apache-2.0
"""The estimate of a step on a GPU: known bounds, and the word "estimate" wherever it is printed."""

from __future__ import annotations

import pytest
from rich.console import Console

from byteback.bench.roofline import BYTES, GPUS, OPERATIONS, RooflineConfig, estimate, run
from byteback.bench.shapes import ConvCase


def test_a_deep_layer_is_bound_by_operations_and_a_thin_one_by_bytes() -> None:
    gpu = GPUS["a100"]
    deep = ConvCase(
        batch=128, in_channels=2048, out_channels=2048, height=28, width=28, kernel_h=3, kernel_w=3, padding_h=1, padding_w=1
    )
    sides = estimate(deep, gpu)
    least = 3 * 2 * deep.macs / (gpu.int8 * 1e12 * OPERATIONS) * 1e3
    assert least < sides.int8 < 1.1 * least
    assert 3.5 < sides.tf32 / sides.int8 < 4.0  # the tensor cores' ratio is 4
    thin = ConvCase(batch=128, in_channels=64, out_channels=64, height=56, width=56, kernel_h=1, kernel_w=1)
    values = 128 * 64 * 56 * 56
    assert estimate(thin, gpu).bf16 >= 3 * 2 * 2 * values / (gpu.bandwidth * 1e9 * BYTES) * 1e3


@pytest.mark.parametrize("device", GPUS)
def test_every_device_prints_an_estimate(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(RooflineConfig(device, "resnet20", 8), Console(width=200))
    printed = capsys.readouterr().out
    assert "ESTIMATE, not measured" in printed and GPUS[device].name in printed and "all layers" in printed


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="a1000"):
        run(RooflineConfig("a1000"), Console())
