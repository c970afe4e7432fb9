# SPDX-License-Identifier: Apache-2.0
"""stream="bfloat16": what travels between the products of a training step is rounded, and user code sees float32 tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import byteback
from byteback import ops
from byteback.nn.fused.sources import LazyActivation, source_of
from byteback.ops.backends import paths
from byteback.ops.contract.bfloat16 import to_bfloat16

BF16 = torch.bfloat16


class Residual(nn.Module):
    """A ResNet block whose second kernel has one pixel, with a shortcut of its own if it has a stride."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, k, 3, stride, 1, bias=False), nn.BatchNorm2d(k)
        self.conv2, self.norm2 = nn.Conv2d(k, k, 1, bias=False), nn.BatchNorm2d(k)
        self.down = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.down is None else self.down(x)
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + skip)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.body = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def two_blocks() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))


def prepared(stream: str, model: nn.Module, recipe: Any = byteback.PlainInt8, **options: Any) -> nn.Module:
    torch.manual_seed(7)
    return byteback.prepare(copy.deepcopy(model), recipe(stream=stream, **options))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, torch.dtype, torch.dtype]]:
    """(dtype of the residual, of y, of the floats) of each product with a norm."""
    calls: list[tuple[Any, torch.dtype, torch.dtype]] = []
    original = ops.conv_normalize_batch

    def watch(*arguments: Any, **options: Any) -> Any:
        residual = arguments[6]
        y, made = original(*arguments, **options)
        calls.append((getattr(residual, "dtype", None), y.dtype, None if made.output is None else made.output.dtype))
        return y, made

    monkeypatch.setattr(ops, "conv_normalize_batch", watch)
    return calls


def test_outputs_and_residuals_are_bfloat16_and_the_head_reads_float32(seen: list[Any]) -> None:
    torch.manual_seed(0)
    model = prepared("bfloat16", Net())
    gradients(model, torch.randn(4, 3, 10, 10))
    # Outputs of kernels of one pixel: the shortcut, and one of each block.
    assert [y for _, y, _ in seen].count(BF16) == 4 and len(seen) == 7
    assert [residual for residual, _, _ in seen if residual is not None] == [BF16] * 3
    # The shortcut and the second block, which others add, and the last block for the head.
    assert [output for _, _, output in seen if output is not None] == [BF16, BF16, torch.float32]


def test_float32_is_the_default_and_changes_nothing(seen: list[Any]) -> None:
    torch.manual_seed(0)
    assert byteback.UnifiedInt8().stream == "float32"
    gradients(prepared("float32", Net()), torch.randn(4, 3, 10, 10))
    assert {dtype for call in seen for dtype in call} == {None, torch.float32}


def test_user_code_sees_float32_tensors_that_hold_rounded_values() -> None:
    torch.manual_seed(1)
    model = prepared("bfloat16", nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Residual(8, 8, 1), Residual(8, 8, 1)))
    seen: list[Tensor] = []
    model[3].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(torch.randn(2, 3, 9, 9)).sum().backward()
    (x,) = seen
    assert isinstance(x, LazyActivation) and x.dtype == torch.float32
    source = source_of(x)
    assert source is not None and source.rounded is not None and source.rounded.dtype == BF16 and source.residual is None
    values = x.detach() + 0.0
    assert values.dtype == torch.float32 and torch.equal(values, source.rounded.float())
    again = x.detach().clone()
    again[:, 0] = 3.0  # writes to a copy
    x.detach()[:, 1] = 5.0  # and to the tensor itself
    assert source_of(x.detach()) is not None and torch.equal(source.plain(), values)


def test_a_written_residual_is_the_one_that_is_added() -> None:
    class Writes(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.writes, self.net = writes, nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Residual(8, 8, 1), Residual(8, 8, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.net[2](self.net[1](self.net[0](x)))
            if self.writes:
                x = x.clone()
                x.zero_()
            return self.net[3](x)

    torch.manual_seed(2)
    model, x = Writes(True), torch.randn(2, 3, 9, 9)
    zeros = prepared("bfloat16", model)(x)
    torch.manual_seed(3)
    float_model = copy.deepcopy(model)
    assert (zeros - float_model(x)).abs().max() <= 0.02 * float_model(x).abs().max()


@pytest.mark.parametrize("recipe", [byteback.UnifiedInt8, byteback.DistributionAdaptiveInt8, byteback.PlainInt8])
@pytest.mark.parametrize("memory", ["float32", "bfloat16", "int8"])
def test_it_stays_near_the_float_stream(recipe: type[byteback.Recipe], memory: str) -> None:
    torch.manual_seed(2)
    net = Net()
    small, large = (prepared(stream, net, recipe, norm_memory=memory) for stream in ("bfloat16", "float32"))
    x = torch.randn(8, 3, 12, 12)
    for _ in range(2):
        exact, *others = (gradients(model, x) for model in (copy.deepcopy(net), small, large))
        assert all((other[0] - exact[0]).norm() <= 0.02 * exact[0].norm() for other in others)
        mine, usual = (torch.cat([(a - b).flatten() for a, b in zip(other, exact, strict=True)]).norm() for other in others)
        assert mine <= 1.3 * usual
    small.eval(), large.eval()
    with torch.no_grad():
        assert (small(x) - large(x)).norm() <= 0.02 * large(x).norm()


@pytest.mark.skipif(paths.available() == ["reference"], reason="this build has no native library")
@pytest.mark.parametrize("memory", ["float32", "bfloat16", "int8"])
def test_every_path_gives_the_same_bits(memory: str) -> None:
    torch.manual_seed(3)
    net, x = Net(), torch.randn(2, 3, 9, 9)
    net.stem.requires_grad_(False)
    results = {}
    for path in paths.available():
        model = prepared("bfloat16", net, norm_memory=memory)
        with paths.path(path):
            y = model.body(F.relu(model.stem(x)))
            y.backward(torch.ones(y.shape) * 0.01)
        results[path] = [y.detach() + 0.0, *(p.grad for p in model.body.parameters())]
    for path, result in results.items():
        assert all(torch.equal(a, b) for a, b in zip(result, results["reference"], strict=True)), path


@pytest.mark.parametrize(("memory", "kept"), [("float32", BF16), ("bfloat16", BF16), ("int8", torch.int8)])
def test_the_norms_input_is_kept_as_it_travelled_or_smaller(memory: str, kept: torch.dtype) -> None:
    torch.manual_seed(4)
    block = prepared("bfloat16", two_blocks(), norm_memory=memory)
    output = block(torch.randn(2, 3, 9, 9))
    saved = [t for t in output.grad_fn.saved_tensors if t is not None and t.shape == output.shape]  # type: ignore[union-attr]
    assert saved[-1].dtype == kept  # behind the int8 input, which has the same shape


def test_it_is_the_norm_of_the_rounded_output() -> None:
    """The unfused arithmetic, with y rounded by hand: the statistics are those of the rounded values."""
    torch.manual_seed(5)
    model = prepared("bfloat16", two_blocks())
    x = torch.randn(2, 3, 9, 9)
    output = model(x) + 0.0
    _, q = source_of(model[:2](x)).int8()  # type: ignore[union-attr]
    conv = model[2]
    w = ops.quantize(conv.weight, conv.weight.abs().amax().reshape(1, 1, 1, 1), None)
    y = to_bfloat16(ops.conv_int8(q.values, q.scale, w[0], w[1], (1, 1), (0, 0), (1, 1), 1)).float()
    torch.testing.assert_close(output, F.batch_norm(y, None, None, model[3].weight, model[3].bias, training=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    class Saved(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm(self.stem(x)))
            for part in self.body:
                x = checkpoint(part, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return self.head(x.mean((2, 3)))

    torch.manual_seed(6)
    net, x = Net(), torch.randn(2, 3, 9, 9)
    saved = Saved()
    saved.load_state_dict(net.state_dict())
    torch.manual_seed(8)
    recipe = replace(byteback.PlainInt8(), stream="bfloat16")
    models = [byteback.prepare(model, recipe) for model in (net, saved)]
    for model in models:
        model.body.requires_grad_()
    one, other = (gradients(model, x) for model in models)
    assert all((a - b).norm() <= 0.15 * a.norm() + 1e-3 for a, b in zip(one, other, strict=True))


def test_blocks_of_their_own_statistics_and_unfused_layers_stay_float32(seen: list[Any]) -> None:
    torch.manual_seed(9)
    net, x = Net(), torch.randn(2, 3, 9, 9)
    recipe = byteback.PlainInt8(stream="bfloat16")
    gradients(byteback.prepare(copy.deepcopy(net), recipe, fuse=False), x)
    assert not seen
    predictions = []
    for stream in ("bfloat16", "float32"):
        model = prepared(stream, net).eval()
        predictions.append(model(x).detach())
    assert not seen and torch.equal(*predictions)


def test_the_recipe_keeps_it_and_refuses_others() -> None:
    recipe = byteback.UnifiedInt8(stream="bfloat16")
    assert byteback.Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(ValueError, match="stream is 'float16'; choose one of float32, bfloat16"):
        byteback.UnifiedInt8(stream="float16")
