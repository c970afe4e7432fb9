# SPDX-License-Identifier: Apache-2.0
"""Where tensors are: operands on different devices are refused, and results are made where the operands are.

The meta device stands for every other device. A meta tensor among CPU tensors used to give memory that nobody had written.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import byteback
from byteback import detection_ops, ops
from byteback.nn.fused.pooling import Joined
from byteback.nn.fused.sources import Floats, Source
from byteback.ops.backends import paths
from byteback.ops.backends.cpu import allocator
from operator_calls import CALLS, called

PATHS = pytest.mark.parametrize("path", ["reference", paths.available()[0]])
EACH = pytest.mark.parametrize("name", list(CALLS))
MIXED = r"is on (cpu|meta).* is on (cpu|meta)"


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


@PATHS
@EACH
def test_an_operand_on_another_device_is_refused(name: str, path: str) -> None:
    if len(CALLS[name][1]) == 1:
        return  # nothing to differ from
    for which in range(len(CALLS[name][1])):
        with paths.path(path), pytest.raises(ValueError, match=MIXED) as caught:
            called(name, which, meta)
        assert str(caught.value).split(":")[0] in (*ops.__all__, "magnitude_clips", "gradient_pair"), caught.value


OPERATORS = [name for name in CALLS if hasattr(torch.ops.byteback, name)]


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_operands_on_different_devices_are_refused(name: str) -> None:
    """Also while torch.compile traces."""
    function, tensors = CALLS[name]
    mode = FakeTensorMode()
    for which in range(len(tensors) if len(tensors) > 1 else 0):
        fakes = [mode.from_tensor(meta(t) if index == which else t) for index, t in enumerate(tensors)]
        with mode, pytest.raises(ValueError, match=MIXED):
            function(*fakes)


@pytest.mark.parametrize("name", ["quantize", "conv_int8", "matmul_int8", "normalize", "normalize_batch", "normalize_grad"])
def test_operands_that_are_all_on_another_device_give_results_there(name: str) -> None:
    function, tensors = CALLS[name]

    def tensors_of(made: object) -> list[Tensor]:
        if isinstance(made, tuple):
            return [tensor for part in made for tensor in tensors_of(part)]
        return [made] if isinstance(made, Tensor) else []

    made = tensors_of(function(*map(meta, tensors)))
    assert made and {tensor.device.type for tensor in made} == {"meta"}


@EACH
def test_the_default_device_changes_nothing(name: str) -> None:
    """Results are made on the CPU where the operands are, whatever device new tensors go to."""
    expected = called(name)
    with torch.device("meta"):
        assert called(name) == expected


def test_tensors_of_another_device_are_not_plain_whenever_byteback_was_imported() -> None:
    """Which key set is an ordinary CPU tensor's is found at import, when another device may be the default one."""
    program = """
import torch
torch.set_default_device("meta")
import byteback
from byteback.ops import dispatch
torch.set_default_device("cpu")
assert not dispatch.is_plain((torch.zeros(2, device="meta"),)), "meta"
torch.set_default_device(None)
assert dispatch.is_plain((torch.zeros(2),)), "cpu"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_layer_is_prepared_on_the_device_of_its_weight() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    with torch.device("meta"):
        byteback.prepare(model, "unified-int8")
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


def test_a_place_on_another_device_is_refused() -> None:
    x, vector = torch.zeros(1, 2, 3, 3), torch.ones(2)
    output = torch.zeros(1, 4, 3, 3, device="meta").contiguous(memory_format=torch.channels_last)[:, :2]
    with pytest.raises(ValueError, match=MIXED):
        ops.normalize(x, vector, vector, None, "none", None, want_float=True, want_mask=False, into=ops.Into(None, output, 4))


def test_the_sources_of_activations_write_where_they_are() -> None:
    x = torch.zeros(1, 2, 3, 3, device="meta").contiguous(memory_format=torch.channels_last)
    vector = torch.ones(2, device="meta")
    source = Source(x, vector, vector, None, "relu", (18, 9, 3, 1))
    assert source.plain().is_meta and source.plain().stride() == (18, 9, 3, 1)
    joined = Joined([Floats(x), Floats(x)], (36, 9, 3, 1))
    assert joined.plain().is_meta


def test_pooled_memory_is_the_cpus() -> None:
    assert allocator.empty((2, 3), (3, 1), torch.float32, torch.device("meta")).is_meta
    assert allocator.empty_like(torch.zeros(2, 3, device="meta"), torch.int8).is_meta


def test_boxes_and_scores_on_different_devices_are_refused() -> None:
    boxes, scores = torch.rand(3, 4), torch.rand(3)
    with pytest.raises(ValueError, match=MIXED):
        detection_ops.nms(boxes, meta(scores), 0.5)
    with pytest.raises(ValueError, match=MIXED):
        detection_ops.roi_align(torch.rand(1, 2, 4, 4), meta(torch.zeros(1, 5)), 1.0, 2, 2, 2, True)
