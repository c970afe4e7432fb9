# SPDX-License-Identifier: Apache-2.0
"""memory counts what autograd keeps, sees the peak, and leaves the model as it was."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback.inspect import memory as MODULE
from html_tables import read_html

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
MB = 1 << 20


class Squares(nn.Module):
    """x·w, then that times itself: one storage saved under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        y = x * self.weight
        return {"squares": [y * y]}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Dropout(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )


def test_a_storage_counts_once_and_parameters_do_not() -> None:
    x = torch.ones(100, requires_grad=True)
    report = byteback.memory(Squares(), x)
    # x (for the weight's gradient) and y (twice): 100 floats each. The weight of 4 bytes is saved for x's gradient.
    assert report.saved_by_dtype == {"float32": (2, 800)}
    assert report.saved == 800
    assert report.parameters == 4
    assert x.grad is None


def test_int8_layers_save_int8() -> None:
    model, images = network(), torch.randn(2, 3, 8, 8)
    before = byteback.memory(model, images)
    byteback.prepare(model, "plain-int8")
    after = byteback.memory(model, images)
    # The second convolution keeps its input (2·8·6·6) and its weight (8·8·3·3) as int8, and so does the norm before it with its
    # own input (2·8·6·6).
    assert after.saved_by_dtype["int8"] == (3, 2 * 2 * 8 * 6 * 6 + 8 * 8 * 3 * 3)
    assert "int8" not in before.saved_by_dtype
    assert "int8" in str(after) and "saved for backward" in str(after)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4)

    def losses(measured: bool) -> list[float]:
        model = byteback.prepare(network(), "unified-int8").train(training)
        model[1].eval()  # a frozen part
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        byteback.scale_learning_rates(optimizer, model)
        result = []
        for _ in range(3):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            if measured:
                grads = [parameter.grad for parameter in model.parameters()]
                state = {name: value.clone() for name, value in model.state_dict().items()}
                measured_yet = [module.unshared.clone() for module in model.modules() if hasattr(module, "unshared")]
                random = torch.get_rng_state()
                byteback.memory(model, images)
                unshared = [module.unshared for module in model.modules() if hasattr(module, "unshared")]
                assert all(torch.equal(a, b) for a, b in zip(unshared, measured_yet, strict=True))
                assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
                assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
                assert torch.equal(torch.get_rng_state(), random)
                assert model.training == training and not model[1].training
            optimizer.step()
            result.append(loss.item())
        return result

    assert losses(True) == losses(False)


def test_the_model_is_left_as_it_was_where_it_fails() -> None:
    model = network().eval()
    before = model[1].running_mean.clone()
    with pytest.raises(RuntimeError):
        byteback.memory(model, torch.randn(2, 3, 9, 9))  # the Linear layer refuses it, after BatchNorm has counted it
    assert torch.equal(model[1].running_mean, before) and not model.training


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="does not require a gradient"):
        byteback.memory(nn.ReLU(), torch.randn(2))


@on_linux
@pytest.mark.parametrize("may_reset", [True, False])
def test_the_peak_sees_what_is_held_for_a_moment(may_reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not may_reset:
        monkeypatch.setattr(MODULE, "_CLEAR_REFS", Path("/absent/clear_refs"))

    def hold() -> None:
        for _ in range(4):  # not by malloc: a test before this one may have told it to keep what is freed
            torch.frombuffer(mmap.mmap(-1, 64 * MB), dtype=torch.uint8).fill_(1)

    growth = MODULE.peak_growth(hold)
    assert growth is not None and 56 * MB < growth < 140 * MB


def test_the_peak_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_STATUS", Path("/absent/status"))
    report = byteback.memory(Squares(), torch.ones(8))
    assert report.peak is None
    assert "unknown" in str(report)


def test_a_max_pool_keeps_a_byte_for_each_output_and_no_activation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    prepared = byteback.prepare(model, byteback.PlainInt8(norm_memory="int8"))
    saved = byteback.memory(prepared, torch.rand(2, 3, 66, 66)).saved_by_dtype
    windows, activation = 2 * 8 * 32 * 32, 2 * 8 * 64 * 64
    assert saved["uint8"][1] == windows + activation // 8  # the pool's taps, ReLU's mask
    assert saved["float32"][1] < 4 * activation
    assert "int64" not in saved


class Branches(nn.Module):
    """Two blocks side by side, as in an Inception: a convolution and a float pool read both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.left = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.after = nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        both = torch.cat([self.left(x), self.right(x)], 1)
        return self.after(both).mean() + F.avg_pool2d(both, 3, stride=1, padding=1).mean()


def test_a_concatenation_that_is_kept_is_counted() -> None:
    torch.manual_seed(0)
    model, images = Branches(), torch.randn(4, 3, 16, 16)
    plain = byteback.memory(model, images)
    prepared = byteback.memory(byteback.prepare(model, "unified-int8"), images)
    assert 4 * 32 * 16 * 16 < prepared.saved < 2 * plain.saved, "at least the int8 copy of the 32 channels"


def test_the_report_is_an_html_table_in_a_notebook() -> None:
    report = byteback.memory(Squares(), torch.ones(100, requires_grad=True))
    title, header, rows = read_html(report._repr_html_())
    assert title == str(report).splitlines()[0] and header == ["part of the peak", "size"]
    assert [row[0] for row in rows[:3]] == ["parameters and buffers", "optimizer state", "gradients"]
    assert rows[1][1] == "-"  # no optimizer was passed


def test_the_parts_add_up_to_the_peak() -> None:
    torch.manual_seed(0)
    model, images = network(), torch.randn(2, 3, 8, 8)
    parameters = sum(4 * p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    byteback.prepare(model, "plain-int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(images), torch.arange(2)).backward()
    optimizer.step()
    report = byteback.memory(model, images, optimizer)
    parts = report.parts()
    assert report.weights >= parameters + buffers and report.optimizer_state == report.gradients == parameters
    assert report.int8_weights == 8 * 8 * 3 * 3
    if report.peak is not None:
        assert parts["peak"] == sum(size for name, size in parts.items() if name != "peak" and size is not None)


def test_float32_is_measured_beside_it() -> None:
    torch.manual_seed(0)
    model, images = network(), torch.randn(2, 3, 8, 8)
    plain = byteback.memory(model, images, compare=True)
    assert plain.float32 is None  # it is float32
    byteback.prepare(model, "plain-int8")
    report = byteback.memory(model, images, compare=True)
    assert report.float32 is not None and report.float32.saved_by_dtype == plain.saved_by_dtype
    assert report.float32.int8_weights == 0 and report.int8_weights > 0
    assert "float32" in str(report).splitlines()[1] + str(report).splitlines()[2]
    assert all(module.enabled for module in model.modules() if hasattr(module, "enabled"))
