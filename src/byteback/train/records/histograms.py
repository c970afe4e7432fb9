# SPDX-License-Identifier: Apache-2.0
"""Histograms of gradients: one batch forward and backward with hooks on every convolution; then all state is restored.

With a hook, fused blocks run layer by layer, so the gradient of the output of a convolution exists before it is quantized.
docs/6-the-trainer.md says what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from byteback.inspect.memory import as_it_was
from byteback.train.records.watch import structure, watched

BINS, CHANNEL_BINS = 101, 61
LOG_FIRST, LOG_BINS = -40, 48
CHANNELS, PICTURED = 64, 3  # channels with statistics; channels with a histogram at each end, sorted by their tails
GAUSSIAN = 0.3  # λ of the second paper
_ELEMENTS = 1 << 22  # enough for a histogram; of larger gradients only the first images are used


def look(model: nn.Module, images: Tensor, loss: Callable[[Tensor], Tensor]) -> list[dict[str, Any]]:
    """Returns a record for every convolution: histograms of the gradient of its output, of its input and of its weight."""
    found: dict[str, dict[str, Any]] = {}
    with as_it_was(model, (images,)):
        handles = []
        for index, (name, layer) in enumerate(watched(model)):
            if not isinstance(layer, nn.Linear):
                record = {"layer": name, "index": index, "structure": structure(layer)}
                handles.append(layer.register_forward_hook(_watcher(record, found)))
        try:
            with torch.enable_grad():
                loss(model(images)).backward()
        finally:
            for handle in handles:
                handle.remove()
    return sorted((record for record in found.values() if "shape" in record), key=lambda record: record["index"])


def _watcher(record: dict[str, Any], found: dict[str, dict[str, Any]]) -> Callable[[Any, Any, Any], None]:
    def on_forward(layer: Any, args: Any, output: Any) -> None:
        if record["layer"] in found or not isinstance(output, Tensor) or not output.requires_grad:
            return  # only the first call of a layer is recorded
        found[record["layer"]] = record
        record["input"] = _linear(_part(args[0].detach().float()), BINS)
        record["weight"] = _linear(layer.weight.detach(), BINS)
        output.register_hook(lambda gradient: record.update(_pictured(gradient.detach().float())))

    return on_forward


def _part(x: Tensor) -> Tensor:
    images = max(1, min(len(x), _ELEMENTS * len(x) // max(x.numel(), 1)))
    return x[:images]


def _pictured(gradient: Tensor) -> dict[str, Any]:
    g = _part(gradient)  # (N, K, ...)
    channels = g.transpose(0, 1).flatten(1)  # (K, values)
    std, peak = channels.std(dim=1, correction=0), channels.abs().amax(dim=1)
    tail = (channels.abs() > std[:, None]).float().mean(dim=1)
    sigma = float(g.std(correction=0))
    return {
        "shape": list(gradient.shape),
        "max": float(peak.max()),
        "mean": float(g.mean()),
        "std": sigma,
        "zeros": float((g == 0.0).float().mean()),
        "tail": float((g.abs() > sigma).float().mean()),
        "linear": _linear(g, BINS),
        "log2": _log2(g),
        "channels": _channels(channels, peak, std, tail),
    }


def _channels(values: Tensor, peak: Tensor, std: Tensor, tail: Tensor) -> dict[str, Any]:
    count = len(values)
    which = torch.linspace(0, count - 1, min(count, CHANNELS)).round().long()
    by_tail = tail.argsort(descending=True, stable=True).tolist()
    ends = dict.fromkeys([*by_tail[:PICTURED], *by_tail[-PICTURED:]])
    return {
        "count": count,
        "gaussian_share": float((tail > GAUSSIAN).float().mean()),
        "which": which.tolist(),
        "max": _short(peak[which]),
        "std": _short(std[which]),
        "tail": _short(tail[which]),
        "histograms": [{"channel": c, "tail": float(tail[c]), **_linear(values[c], CHANNEL_BINS)} for c in ends],
    }


def _linear(x: Tensor, bins: int) -> dict[str, Any]:
    """Returns a histogram with equal bins from -max|x| to max|x|."""
    edge = float(x.abs().max()) if x.numel() else 0.0
    if not 0.0 < edge < float("inf"):
        return {"edge": edge, "counts": [0] * (bins // 2) + [x.numel()] + [0] * (bins // 2)}
    return {"edge": edge, "counts": torch.histc(x, bins, -edge, edge).long().tolist()}


def _log2(x: Tensor) -> dict[str, Any]:
    """Returns a histogram of nonzero |x| by its binary exponent."""
    magnitude = x[x != 0.0]
    exponent = torch.frexp(magnitude).exponent.long() - 1 - LOG_FIRST  # the mantissa of frexp is in [1/2, 1)
    inside = exponent[(exponent >= 0) & (exponent < LOG_BINS)]
    counts = torch.bincount(inside, minlength=LOG_BINS)
    below, above = int((exponent < 0).sum()), int((exponent >= LOG_BINS).sum())
    return {"first": LOG_FIRST, "counts": counts.tolist(), "below": below, "above": above}


def _short(x: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in x.tolist()]
