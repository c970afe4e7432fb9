# SPDX-License-Identifier: Apache-2.0
"""Max-pool and single pixels, which only the native paths have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from byteback.ops import pooling
from fuzz.fields import Axes, Case, Choice, Number, channels
from fuzz.harness import PATHS, Check, Kind
from fuzz.operands import FLOATS, LAYOUTS, floats, laid_out
from oracles import pools

NATIVE = tuple(path for path in PATHS if path != "reference")


def _window(case: Case) -> tuple[pooling.Window, list[int]]:
    """A window that PyTorch takes, and an image that has at least one of it."""
    kernel, stride, dilation, extra = (case[name][:2] for name in ("kernel", "stride", "dilation", "extra"))
    padding = [min(p, k // 2) for p, k in zip(case["padding"], kernel, strict=False)]
    size = [max((k - 1) * d + 1 - 2 * p, 1) + e for k, d, p, e in zip(kernel, dilation, padding, extra, strict=True)]
    window = pooling.Window(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), case["ceil"])  # type: ignore[arg-type]
    return window, size


def _build_pool(case: Case, rng: np.random.Generator) -> Check:
    window, size = _window(case)
    x = laid_out(floats([case["batch"], case["channels"], *size], case["x"], rng), case["layout"])
    y, which = pools.max_pool(x.numpy(), window)
    g = laid_out(floats(y.shape, case["g"], rng), case["g_layout"])
    taps = laid_out(torch.from_numpy(which), case["layout"] if not case["layout"].startswith("expanded") else "contiguous")

    def call() -> Any:
        assert pooling.has_max_pool(x, window)
        return (*pooling.max_pool(x, window), pooling.max_pool_grad(g, taps, x.shape, window))

    expected = y, which, pools.max_pool_grad(g.numpy(), which, tuple(x.shape), window)
    return Check(call, expected, [x, g, taps], NATIVE)


def _build_pixels(case: Case, rng: np.random.Generator) -> Check:
    stride = case["stride"][0], case["stride"][1]
    size = (case["batch"], case["channels"], case["extra"][0] + 1, case["extra"][1] + 1)
    x = laid_out(floats(size, case["x"], rng), "channels_last")
    expected = x.numpy()[:, :, :: stride[0], :: stride[1]]
    y = laid_out(torch.from_numpy(np.ascontiguousarray(expected)), "channels_last")
    spread = pools.spread_pixels(y.numpy(), size, stride)
    return Check(
        lambda: (pooling.take_pixels(x, stride), pooling.spread_pixels(y, size, stride)), (expected, spread), [x, y], NATIVE
    )


_IMAGE = {
    "batch": Number(1, 3),
    "channels": channels(70),
    "stride": Axes(Number(1, 4)),
    "extra": Axes(Number(0, 9)),
    "x": FLOATS,
}
KINDS = [
    Kind(
        "max_pool",
        2,
        {
            **_IMAGE,
            "kernel": Axes(Number(1, 4)),
            "padding": Axes(Number(0, 2)),
            "dilation": Axes(Choice((1, 1, 1, 2, 3))),
            "ceil": Choice((False, True)),
            "layout": LAYOUTS,
            "g": FLOATS,
            "g_layout": LAYOUTS,
        },
        _build_pool,
    ),
    Kind("pixels", 1, _IMAGE, _build_pixels),
]
