# SPDX-License-Identifier: Apache-2.0
"""A quantizer with what a layer would hand to it: for the tests of tests/quantize."""

import dataclasses
from typing import NamedTuple

import torch

from byteback import Choice, ClipRule, TensorRule
from byteback.quantize import (
    Moment,
    Quantizer,
    Settings,
    register,
)

NAN, INF = float("nan"), float("inf")
NOW = torch.tensor(7)  # an iteration


def settings(rule=None, role="input", on_nonfinite="raise", observe_every=10, momentum=0.1):
    return register(Settings(rule or TensorRule(), role, "block.conv", on_nonfinite, observe_every, momentum))


class Bench(NamedTuple):
    """One quantizer with what a layer would hand to it."""

    quantizer: Quantizer
    handle: int
    nonfinite: torch.Tensor

    def __call__(self, x, iteration=0, key=None, slot=0, remember=True):
        moment = Moment(torch.tensor(iteration), slot, remember)
        return self.quantizer.quantize(x, self.handle, moment, self.nonfinite, key)


def bench(rule=None, channels=1, tracks=True, **options):
    entries = (rule or TensorRule()).clip.entries(channels)
    return Bench(Quantizer(entries, tracks), settings(rule, **options), torch.tensor(0))


def state(quantizer):
    return {name: buffer.clone() for name, buffer in quantizer.named_buffers()}


def assert_untouched(quantizer, before):
    for name, buffer in quantizer.named_buffers():
        assert torch.equal(buffer, before[name]), name


@dataclasses.dataclass(frozen=True)
class Fixed(ClipRule):
    """Always the same clip, and nothing to remember."""

    bound: float = 1.0

    def choose(self, x, axis, memory):
        shape = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
        return Choice(torch.full(shape, self.bound))
