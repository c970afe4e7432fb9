# SPDX-License-Identifier: Apache-2.0
"""Splits the time of a training step by phase and by kind of operator, with the profiler.

The profiler slows small operators down, so it runs on separate steps, not on the timed ones. It gives the share of each kind in
a phase; the milliseconds of the phase come from the timed rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from byteback.bench.training_step import PHASES, Side

OTHER = "other"
# The first entry with a part of the operator's name is its kind.
_KINDS = (
    ("convolution", ("conv",)),
    ("batch norm", ("batch_norm", "batchnorm")),
    ("relu", ("relu", "clamp_min", "threshold", "hardtanh", "hardswish", "silu", "gelu")),
    ("pool", ("pool",)),
    ("matrix product", ("addmm", "aten::mm", "matmul", "bmm")),
    ("copies", ("aten::copy_", "aten::clone", "aten::index", "aten::cat")),
    ("sums", ("aten::add", "aten::sum")),
)
_OWN = (
    ("convolution", ("conv_int8",)),
    ("matrix product", ("matmul_int8",)),
    ("quantize", ("quantize", "absmax", "moments", "tail_count", "cosine", "dot_terms", "noise_key", "sum_channels")),
)


def kind(operator: str) -> str:
    """Returns the kind of an operator. An operator of Byteback that is in no table is its own kind.

    >>> kind("aten::mkldnn_convolution"), kind("byteback::conv_int8_grad_input"), kind("aten::empty")
    ('convolution', 'convolution', 'other')
    >>> kind("byteback::norm_relu")
    'norm_relu'
    """
    if operator.startswith("byteback::"):
        name = operator.removeprefix("byteback::")
        return next((label for label, starts in _OWN if name.startswith(starts)), name)
    name = operator.lower()
    return next((label for label, parts in _KINDS if any(part in name for part in parts)), OTHER)


def shares(side: Side, steps: int) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Profiles some steps. Returns (phase -> kind -> share of the phase, operator -> share of the step)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            side.step()
    return _shares(profile.events())


def _shares(events: Iterable[Any]) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    by_phase: dict[str, dict[str, float]] = {phase: defaultdict(float) for phase in PHASES}
    by_operator: dict[str, float] = defaultdict(float)
    for event in events:
        phase = _phase(event)
        if phase is None:
            continue
        own = event.self_cpu_time_total  # without its children, so that the parts add up to the total
        by_phase[phase][kind(event.name)] += own
        by_operator[event.name if event.name not in PHASES else "python"] += own
    parts = {phase: _normalized(own) for phase, own in by_phase.items()}
    return parts, _normalized(by_operator)


def _phase(event: Any) -> str | None:
    while event is not None:
        if event.name in PHASES:
            return str(event.name)
        event = event.cpu_parent
    return None


def _normalized(times: dict[str, float]) -> dict[str, float]:
    total = sum(times.values()) or 1.0
    return {name: value / total for name, value in sorted(times.items(), key=lambda item: -item[1])}
