# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph needs of a training step, as far as meta tensors can show it: each step does the same.

A graph repeats the launches that it has captured, with the same numbers and addresses. So no launch may depend on a value, no
number that the host passes may change, nothing may be copied from the host, and the state must stay in the same tensors.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback.nn.fused import lazy
from byteback.ops.backends.triton import launch
from gpu_check.recorded import Net, recording

Step = list[tuple[Any, ...]]

COPIES = ("tensor", "as_tensor", "from_numpy")
"""Functions of PyTorch that copy numbers of the host."""


def described(value: Any) -> Any:
    return (str(value.device), value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value


def steps_of(recipe: str, fuse: bool, count: int, patch: pytest.MonkeyPatch) -> tuple[list[Step], list[str], bool]:
    """The launches of some steps, which functions copied numbers of the host after the first, and whether all state stayed."""
    launches: Step = []
    copies: list[str] = []

    def record(kernel: Any, grid: Any, arguments: Any, constants: Any, warps: int, stages: int) -> None:
        # The order of errors counts launches; within a step it is right also if it is repeated.
        given = {name: described(value) for name, value in zip(kernel.arg_names, arguments, strict=False) if name != "ORDER"}
        launches.append((kernel.fn.__name__, grid, *given.items(), *constants.items(), warps, stages))

    def watch(name: str) -> Callable[..., Any]:
        original = getattr(torch, name)

        def watching(*arguments: Any, **named: Any) -> Any:
            copies.append(f"{name} in {traceback.extract_stack()[-2].filename}")
            return original(*arguments, **named)

        return watching

    torch.manual_seed(0)
    chosen = replace(byteback.recipes.resolve(recipe), on_nonfinite="propagate")
    model = byteback.prepare(Net(16), chosen, fuse=fuse).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    seen = []
    # Layers without a block would take the shapes of float layers on the meta device, which has no autocast either.
    patch.setattr(Tensor, "is_meta", False, raising=False)
    patch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    patch.setattr(lazy, "_autocasts", lambda _: False)
    with recording(), patch.context() as inner:
        inner.setattr(launch, "on_launch", record)
        for step in range(count):
            if step == 1:
                for name in COPIES:
                    patch.setattr(torch, name, watch(name))
                kept = _state(model, optimizer)
            launches.clear()
            optimizer.zero_grad()
            model(torch.empty(4, 3, 32, 32, device="meta")).square().mean().backward()
            optimizer.step()
            seen.append(list(launches))
    after = _state(model, optimizer)
    return seen, copies, len(kept) == len(after) and all(one is other for one, other in zip(kept, after, strict=True))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [*model.parameters(), *model.buffers()]
    return held + [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize(
    ("recipe", "fuse"),
    [
        ("unified-int8", True),
        ("distribution-adaptive-int8", False),
        *(
            pytest.param(recipe, fuse, marks=pytest.mark.slow)
            for recipe, fuse in (("unified-int8", False), ("distribution-adaptive-int8", True), ("plain-int8", True))
        ),
    ],
)
def test_every_step_launches_the_same(recipe: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, copies, stays = steps_of(recipe, fuse, 3, monkeypatch)
    assert steps[1] == steps[2] and len(steps[1]) > 100
    # The first call of a layer also measures its input.
    assert len(steps[0]) >= len(steps[1])
    assert not copies and stays
    devices = {entry[1][0] for one in steps[1] for entry in one[2:-2] if isinstance(entry[1], tuple)}
    assert devices == {"meta"}


def test_a_number_of_the_host_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The height of the tiles of quantize depends on how often it was asked for."""
    calls = itertools.count()
    module = sys.modules["byteback.ops.backends.triton.quantize"]
    monkeypatch.setattr(module, "height", lambda *_: 1 << next(calls) % 7)
    steps, _, _ = steps_of("plain-int8", False, 3, monkeypatch)
    assert steps[1] != steps[2]
