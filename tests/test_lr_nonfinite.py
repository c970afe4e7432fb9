# SPDX-License-Identifier: Apache-2.0
"""Steps that meet NaN or Inf: dropped, handed on or refused, by the policy of the recipe."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import byteback
from fixed_factor import network, weights
from two_ranks import run_ranks


def step_of(model: nn.Module, optimizer: Optimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    images = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(3))
    (model(images).square().mean() * scale).backward()
    optimizer.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_skip_drops_the_whole_step(bad: float) -> None:
    model = network(on_nonfinite="skip")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    step_of(model, optimizer)
    before = weights(model)
    momentum = {index: state["momentum_buffer"].clone() for index, state in optimizer.state_dict()["state"].items()}
    with pytest.warns(UserWarning, match="gradients were dropped"):
        step_of(model, optimizer, bad)
    assert scaling.skipped == 1
    assert all(parameter.grad is None for parameter in model.parameters()), "the float layers' gradients too"
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    for index, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], momentum[index])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(model, optimizer)
    assert scaling.skipped == 1, "a good step after a bad one is taken"
    assert not torch.equal(model[1].weight, before["1.weight"])


def test_a_resumed_run_does_not_skip_again_what_was_skipped_before() -> None:
    """The count of bad tensors is in the checkpoint; loading it is no new bad tensor."""
    model = network(on_nonfinite="skip")
    optimizer = SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    with pytest.warns(UserWarning, match="dropped"):
        step_of(model, optimizer, float("nan"))
    resumed = network(on_nonfinite="skip")
    its_optimizer = SGD(resumed.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(its_optimizer, resumed)
    resumed.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step_of(resumed, its_optimizer)
    assert scaling.skipped == 0


def test_a_step_is_still_skipped_after_a_float_checkpoint_reset_the_count() -> None:
    model = network(on_nonfinite="skip")
    optimizer = SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    with pytest.warns(UserWarning, match="dropped"):
        step_of(model, optimizer, float("nan"))
    model.load_state_dict(byteback.float_state_dict(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step_of(model, optimizer, float("nan"))
    assert scaling.skipped == 2
    assert all(bool(value.isfinite().all()) for value in weights(model).values())


def test_propagate_hands_nan_on() -> None:
    model = network(on_nonfinite="propagate")
    (model(torch.randn(2, 2, 6, 6)).square().mean() * float("inf")).backward()
    assert all(bool(layer.weight.grad.isnan().all()) for layer in (model[1], model[2]))


def test_raise_names_layer_and_role() -> None:
    model = network()
    with pytest.raises(byteback.NonFiniteError, match=r"2: grad_output holds \d+ NaN or Inf"):
        (model(torch.randn(2, 2, 6, 6)).square().mean() * float("nan")).backward()


RANK = """
    import os, sys, warnings, torch, byteback
    import torch.distributed as dist
    from torch import nn
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3))
    byteback.prepare(model, byteback.UnifiedInt8(on_nonfinite="skip", strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    warnings.simplefilter("ignore")
    images = torch.randn(2, 2, 8, 8)
    moved = []
    for step in range(3):
        optimizer.zero_grad()
        bad = step == 1 and rank == 1
        (model(images).square().mean() * (float("nan") if bad else 1.0)).backward()
        if step == 0:
            grads = [torch.zeros_like(model[1].weight) for _ in range(2)]
            dist.all_gather(grads, model[1].weight.grad)
            close = torch.allclose(*grads, rtol=0.2, atol=0.02)
            print("noise", "shared" if torch.equal(*grads) else "own", "close" if close else "far")
        before = model[1].weight.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(before, model[1].weight))
    print("moved", moved, "skipped", scaling.skipped, flush=True)
    dist.destroy_process_group()
    os._exit(0)
"""


def test_ranks_skip_together_and_draw_their_own_noise(tmp_path: Path) -> None:
    """Same weights, same images, and NaN on rank 1 only: both drop that step, and their gradients differ by noise alone."""
    for rank, output in enumerate(run_ranks(RANK, tmp_path)):
        assert output.splitlines() == ["noise own close", "moved [True, False, True] skipped 1"], f"rank {rank}"
