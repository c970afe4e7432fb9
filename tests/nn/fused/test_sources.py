# SPDX-License-Identifier: Apache-2.0
"""Sources: predictions that wait for their reader give the bits of blocks that do not, and floats hold nothing beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback import ops
from byteback.nn.fused.pooling import Joined
from byteback.nn.fused.sources import Floats, LazyActivation, PredictionSource, source_of
from byteback.ops.backends.cpu.prediction import Prediction


class Net(nn.Module):
    """Residual, branches, pools, a depthwise convolution, a convolution without a norm."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.act = act
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv1, self.norm1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.left, self.right = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 12, 3, padding=1)
        self.wide = nn.Conv2d(20, 20, 3, padding=1, groups=20, bias=False)
        self.norm3 = nn.BatchNorm2d(20, affine=False)
        self.last = nn.Conv2d(20, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.act(self.norm(self.stem(x))), 2)
        x = F.relu(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))) + x)
        x = torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], 1)
        x = F.relu6(self.norm3(self.wide(x)))
        return self.head(F.relu(self.last(x)).mean((2, 3)))


def trained(model: nn.Module, recipe: byteback.Recipe | str = "plain-int8") -> nn.Module:
    torch.manual_seed(7)
    model = byteback.prepare(model, recipe)
    for _ in range(2):
        model(torch.randn(4, 3, 14, 14)).square().sum().backward()
    return model.eval()


@pytest.mark.parametrize("act", [F.relu, F.hardswish, F.silu, F.gelu, torch.tanh])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("memory", ["float32", "int8"])
def test_a_prediction_has_the_bits_of_a_forward_that_keeps_everything(act: Any, channels_last: bool, memory: str) -> None:
    model = trained(Net(act), byteback.PlainInt8(residual_memory=memory))
    x = torch.randn(3, 3, 14, 14)
    if channels_last:
        x, model = x.contiguous(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    expected = model(x).detach()
    with torch.no_grad():
        result = model(x)
    assert type(result) is Tensor and torch.equal(result, expected)
    with torch.inference_mode():
        assert torch.equal(model(x) + 0.0, expected)


def test_no_product_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(Net())
    calls: list[str] = []
    for name in ("conv_int8", "normalize", "conv_normalize", "quantize"):
        original = getattr(ops, name)

        def count(*args: Any, original: Any = original, name: str = name, **options: Any) -> Any:
            calls.append(name)
            return original(*args, **options)

        monkeypatch.setattr(ops, name, count)
    run = Prediction.run

    def planned(*args: Any) -> Any:
        made = run(*args)
        calls.extend(() if made is None else ("conv_normalize",))
        return made

    monkeypatch.setattr(Prediction, "run", planned)
    with torch.no_grad():
        model(torch.randn(3, 3, 14, 14))
    assert calls.count("conv_normalize") == 6 and "conv_int8" not in calls
    assert calls.count("normalize") == 1  # the float stem
    assert calls.count("quantize") == 1  # what the pool hands on


def test_a_second_clip_and_floats_of_a_block_that_waited() -> None:
    model = trained(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    )
    x = torch.randn(2, 3, 9, 9)
    kept = source_of(model[:5](x)).plain()  # type: ignore[union-attr]
    with torch.no_grad():
        for order in ("two clips", "floats first", "maximum first"):
            waiting = model[:5](x)
            source = source_of(waiting)
            assert isinstance(waiting, LazyActivation) and isinstance(source, PredictionSource)
            assert source.output is None and not source.quantized
            if order == "floats first":
                assert torch.equal(waiting + 0.0, kept)
            if order == "maximum first":
                assert torch.equal(source.clip(), kept.max())
            for clip in (torch.tensor(0.7), torch.tensor(0.2)):
                values, scale, counts, _ = ops.quantize(kept, clip.reshape(1, 1, 1, 1))
                _, q = source.int8(clip)
                assert torch.equal(q.values, values) and torch.equal(q.scale, scale) and torch.equal(q.counts, counts)
            assert torch.equal(waiting + 0.0, kept)


def test_writing_to_it_and_to_the_weights_afterwards() -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)))
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        before = model(x)
        waiting = model[:4](x)
        model[2].weight.mul_(2.0)
        assert torch.equal(model[4](waiting), before)
        waiting = model[:4](x)
        twin = waiting + 0.0
        waiting[:, 1] = 0.5
        twin[:, 1] = 0.5
        assert torch.equal(model[4](waiting), model[4](twin))


def test_nan_is_found_by_its_reader() -> None:
    model = trained(Net())
    with torch.no_grad():
        model.norm1.bias[0] = float("nan")
        with pytest.raises(byteback.NonFiniteError, match="conv2: input"):
            model(torch.randn(3, 3, 14, 14))
    model = trained(Net(), byteback.PlainInt8(on_nonfinite="propagate"))
    with torch.no_grad():
        model.norm1.bias[0] = float("nan")
        assert bool(model(torch.randn(3, 3, 14, 14)).isnan().all())


def test_a_copy_of_a_model_that_was_never_trained_predicts_the_same() -> None:
    torch.manual_seed(1)
    model = byteback.prepare(Net(), "unified-int8").eval()
    x = torch.randn(2, 3, 14, 14)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(model(x).detach(), copy.deepcopy(model)(x).detach())


# ---- what a source holds -----------------------------------------------------------------------------------------------


class Stream(nn.Module):
    """A residual stream of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.convs[0](x)))
        for conv, norm in zip(self.convs[1:], self.norms[1:], strict=True):
            x = F.relu(norm(conv(x)) + x)
        return x


def test_the_plain_output_of_a_block_holds_no_other_floats() -> None:
    """Each output is the residual of the next block: else the last one would hold all of them."""
    torch.manual_seed(0)
    model = byteback.prepare(Stream(), "plain-int8")
    output = model(torch.randn(2, 8, 6, 6))
    source = source_of(output)
    assert isinstance(source, Floats) and source.plain().data_ptr() == output.data_ptr()
    floats = {t.data_ptr() for t in source.tensors() if t.dtype == torch.float32}
    assert floats == {output.data_ptr()}
    assert source.never_negative() and torch.equal(source.clip(), output.detach().max())


@pytest.mark.parametrize("channels_last", [True, False])
def test_floats_replace_what_they_were_computed_from(channels_last: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    x = torch.randn(2, 3, 9, 9)
    if channels_last:
        x, model = x.contiguous(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    byteback.prepare(model, "plain-int8")
    sources = []
    for _ in range(2):
        lazy = model[:5](x)
        assert isinstance(lazy, LazyActivation) and lazy.source is not None
        sources.append(lazy.source)
    settled, other = sources
    floats = settled.plain()
    assert settled.is_settled and not other.is_settled
    assert [t.data_ptr() for t in settled.tensors() if t.dtype == torch.float32 and t.numel()] == [floats.data_ptr()]
    for clip in (None, torch.tensor(0.3)):
        (_, mine), (_, theirs) = settled.int8(clip), other.int8(clip)
        assert torch.equal(mine.values, theirs.values) and torch.equal(mine.counts, theirs.counts)
    assert torch.equal(settled.clip(), other.clip())
    given = settled.give()
    assert torch.equal(given, other.give()) and given.data_ptr() != floats.data_ptr()
    assert torch.equal(settled.plain(), floats)
    part = torch.empty(2, 5, 5, 16).movedim(-1, 1)  # channels last, twice as wide
    ints = torch.empty(part.shape, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    settled.write_into(torch.tensor(0.3), True, ops.Into(ints[:, 8:], part[:, 8:], 16))
    assert torch.equal(part[:, 8:], floats) and torch.equal(ints[:, 8:], other.int8(torch.tensor(0.3))[1].values)


def test_a_concatenation_lets_go_of_its_parts_once_its_floats_are_written() -> None:
    torch.manual_seed(0)
    model = trained(Net()).train()
    x = torch.randn(2, 16, 6, 6, requires_grad=True)

    def joined() -> Any:
        both = torch.cat([F.relu(model.left(x)), F.relu(model.right(x))], 1)
        assert isinstance(both, LazyActivation) and isinstance(both.source, Joined)
        return both

    first, second = joined(), joined()
    floats = first.source.plain()
    assert first.source.is_settled and not first.source.parts and first.source.never_negative()
    clip = torch.tensor(0.4)
    assert torch.equal(first.source.int8(clip)[1].values, second.source.int8(clip)[1].values)
    wider = torch.cat([first, second], 1)
    assert torch.equal(wider + 0.0, torch.cat([floats, floats], 1))
