# SPDX-License-Identifier: Apache-2.0
"""Models on GPUs as users expect them, as far as meta tensors, the interpreter and false device properties can show it."""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback.ops.backends import gpu, reference, triton
from byteback.ops.backends.triton import launch, self_check
from gpu_check.recorded import Net, recording
from interpreted import interpreting
from same_bits import assert_same_bits

RECIPE = "distribution-adaptive-int8"


def launches_of(before: bool) -> Counter[str]:
    """The kernels of a step of a model that was moved before or after `prepare`."""
    torch.manual_seed(0)
    model: nn.Module = Net(16)
    if before:
        model.to("meta")
    byteback.prepare(model, byteback.DistributionAdaptiveInt8(on_nonfinite="propagate"))
    model.to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    with recording() as seen:
        model(torch.empty(4, 3, 16, 16, device="meta")).sum().backward()
        optimizer.step()
    assert {value.device.type for value in (*model.parameters(), *model.buffers())} == {"meta"}
    return sum((Counter({made.name: count}) for made, count in seen.items()), Counter())


def test_a_model_may_be_moved_before_or_after_it_is_prepared() -> None:
    before, after = launches_of(before=True), launches_of(before=False)
    assert before == after and before["conv_grad_weight.grad_weight"] == 4


def test_every_gpu_of_a_process_is_checked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=7 + device.index, minor=0, gcnArchName="")
    )
    monkeypatch.setattr(
        self_check, "self_check", lambda device: checked.append(device.index) or ("wrong" if device.index == 2 else "")
    )
    gpu.backend.cache_clear()
    try:
        for index, why in ((0, "compute capability is 7.0"), (2, "wrong")):
            with pytest.warns(UserWarning, match=f"cuda:{index} runs on the reference.*{why}"):
                assert gpu.backend(torch.device("cuda", index)) is reference
        for _ in range(2):
            assert gpu.backend(torch.device("cuda", 1)) is triton
    finally:
        gpu.backend.cache_clear()
    assert checked == [2, 1]


def test_a_kernel_runs_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Any:
        entered.append(device)
        yield

    ran = []
    monkeypatch.setattr(torch.cuda, "device", on)
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    launch.launch({(3,): lambda *arguments, **named: ran.append((*entered, named["enable_fp_fusion"]))}, (3,), tensor)
    assert ran == [(torch.device("cuda", 1), False)]


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 3, 2)), RECIPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    return model, optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))).float().square().mean().backward()
        optimizer.step()


def resumed(first: Any, second: Any) -> list[Tensor]:
    """The state after one step in each of two contexts, and a checkpoint between them."""
    model, optimizer = small()
    with first():
        steps(model, optimizer, 0, 1)
    saved = model.state_dict(), optimizer.state_dict()
    model, optimizer = small()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with second():
        steps(model, optimizer, 1, 1)
    return list(model.state_dict().values())


CPU = contextlib.nullcontext


@pytest.mark.parametrize(("first", "second"), [(CPU, interpreting), pytest.param(interpreting, CPU, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_with_the_same_bits_on_the_other_device(first: Any, second: Any) -> None:
    assert_same_bits(resumed(first, second), resumed(CPU, CPU))


def test_int8_layers_under_autocast_have_the_bits_of_the_cpu() -> None:
    found = []
    for where in (CPU, interpreting):
        model, optimizer = small()
        with where(), torch.autocast("cpu", torch.bfloat16):
            steps(model, optimizer, 0, 1)
        found.append(list(model.state_dict().values()))
    assert_same_bits(found[1], found[0])
