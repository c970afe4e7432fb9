# SPDX-License-Identifier: Apache-2.0
"""What travels between fused blocks, and what waits inside one, is a float tensor to everyone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import byteback
from byteback.nn.fused.lazy import LazyConv
from byteback.nn.fused.sources import LazyActivation, source_of
from small_blocks import Net, assert_near, pair, step


def test_int8_travels_between_blocks() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    )
    byteback.prepare(model, "plain-int8")
    middle = model[2](model[1](model[0](torch.randn(2, 3, 9, 9))))
    assert isinstance(middle, LazyActivation) and middle.requires_grad and middle.grad_fn is not None
    source = source_of(middle)
    assert source is not None and source.output is None and source.quantized[0][1].values.dtype == torch.int8
    expected = source.plain()
    assert torch.equal(middle + 0.0, expected)
    error = (source.quantized[0][1].dequantize() - expected).abs().max()
    assert float(error) <= float(source.clip()) / 254 * 1.001


def chain(recipe: str = "plain-int8") -> tuple[nn.Sequential, Tensor]:
    """Two blocks, and the activation between them."""
    torch.manual_seed(3)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    )
    byteback.prepare(model, recipe)
    return model, model[:3](torch.randn(2, 3, 9, 9))


USES: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean(),
    "pool": lambda x: F.max_pool2d(x, 2),
    "cat": lambda x: torch.cat([x, x], 1),
    "index": lambda x: x[:, 1:3],
    "view": lambda x: x.view(2, 8, -1) if x.is_contiguous() else x.reshape(2, 8, -1),
    "flatten": lambda x: torch.flatten(x, 1),
    "multiply": lambda x: x * torch.ones(8, 1, 1),
    "add to plain": lambda x: torch.ones(2, 8, 7, 7) + x,
    "clone": lambda x: x.clone(),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "stack": lambda x: torch.stack([x, x]),
    "dropout": lambda x: F.dropout(x, 0.0),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "in-place multiply": lambda x: x.mul_(2.0),
    "in-place add": lambda x: x.__iadd__(1.0),
    "checkpointed": lambda x: checkpoint(torch.square, x, use_reentrant=False),
}


@pytest.mark.parametrize("use", USES)
def test_an_activation_is_a_float_tensor_to_everyone(use: str) -> None:
    model, x = chain()
    plain = source_of(x).plain().clone().requires_grad_()  # type: ignore[union-attr]
    twin = plain * 1.0
    expected = USES[use](twin)
    result = USES[use](x)
    assert torch.equal(result + 0.0, expected)
    assert result.stride() == expected.stride()
    torch.manual_seed(0)
    seed = torch.randn(expected.shape)
    grads = torch.autograd.grad(result, list(model[0].parameters()), seed, allow_unused=True, retain_graph=True)
    assert grads[0] is not None and float(grads[0].abs().sum()) > 0
    (grad_plain,) = torch.autograd.grad(expected, plain, seed)
    if not use.startswith("in-place"):
        (grad_x,) = torch.autograd.grad(result, x, seed)
        assert torch.equal(grad_x, grad_plain)


def test_an_activation_that_was_written_to_is_read_as_written() -> None:
    model, x = chain()
    changed = x.mul(1.0)
    changed[:, 0] = 3.0
    x[:, 0] = 3.0
    assert source_of(x) is None
    assert torch.equal(model[3:](x), model[3:](changed))


def test_printing_copying_and_saving_an_activation(tmp_path: Any) -> None:
    _, x = chain()
    assert "tensor(" in repr(x)
    assert x.detach().numpy().shape == (2, 8, 7, 7) and len(x.detach().tolist()) == 2
    plain = pickle.loads(pickle.dumps(x.detach()))
    assert type(plain) is Tensor and torch.equal(plain, x.detach() + 0.0)
    torch.save(x.detach(), tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), plain)
    assert torch.equal(copy.deepcopy(x.detach()), plain)


@pytest.mark.parametrize("use", ["mean", "pool", "cat", "view", "add to plain", "clone", "index"])
def test_a_pending_block_is_a_tensor_to_everyone(use: str) -> None:
    model, _ = chain()
    x = torch.randn(2, 3, 9, 9)
    for stop in (1, 2):
        pending = model[0](x)
        for module in model[1:stop]:
            pending = module(pending)
        assert isinstance(pending, LazyConv) and pending.shape == (2, 8, 7, 7) and pending.dim() == 4
        model[1].running_mean.zero_()
        unfused = copy.deepcopy(model)
        byteback.restore(unfused)
        expected = unfused[:stop](x)
        torch.testing.assert_close(USES[use](pending), USES[use](expected), rtol=1e-4, atol=1e-5)


def test_a_branch_that_the_trace_did_not_see() -> None:
    model = Net()
    fused, unfused = pair(model)
    for each in (fused, unfused):
        each.first.norm1 = nn.Identity()
    x = torch.randn(4, 3, 8, 8)
    assert_near(step(fused, x)[0], step(unfused, x)[0])


def test_hooks_inside_a_block_see_their_tensors() -> None:
    fused, unfused = pair(Net(act=nn.ReLU()))  # PyTorch refuses a backward hook before an in-place module
    x = torch.randn(4, 3, 8, 8)
    for name in ("first.norm1", "first.conv2", "norm", "first.act"):
        seen: dict[int, list[Tensor]] = {0: [], 1: []}
        handles = []
        for i, model in enumerate((fused, unfused)):
            module = model.get_submodule(name)
            handles += [
                module.register_forward_hook(lambda m, a, out, to=seen[i]: to.append(out.detach() + 0.0)),
                module.register_full_backward_hook(lambda m, gi, go, to=seen[i]: to.append(go[0] + 0.0)),
            ]
        step(fused, x), step(unfused, x)
        assert len(seen[0]) == len(seen[1]) > 0
        for a, b in zip(seen[0], seen[1], strict=True):
            assert_near(a, b)
        for handle in handles:
            handle.remove()


def test_an_input_that_changes_while_the_block_waits_is_an_error() -> None:
    model, _ = chain()
    x = torch.randn(2, 3, 9, 9)
    waiting = model[0](x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified in place after the call"):
        model[1](waiting).sum()
