# SPDX-License-Identifier: Apache-2.0
"""What a quantizer writes down: the native library writes the very bits that PyTorch would."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from byteback.ops.backends.cpu import library as native_library
from byteback.ops.backends.cpu.quantizer import STEPS as NATIVE
from byteback.ops.backends.reference.quantizer import STEPS as PLAIN
from byteback.ops.backends.reference.quantizer import Entry
from byteback.ops.quantizer import CLIP, COLUMNS, Moment, State
from byteback.quantize import Settings, TensorRule

pytestmark = pytest.mark.skipif(native_library.native is None, reason="this build has no native library")
SLOTS = 8


def buffers(channels: int, tracks: bool, fill: float) -> State:
    def full(*size: int) -> Tensor:
        return torch.full(size, fill)

    tracked = full(SLOTS, channels) if tracks else None
    updated = torch.zeros(SLOTS, dtype=torch.int64)
    row, own = full(SLOTS), torch.zeros(SLOTS, 5, dtype=torch.float64)
    return State(full(SLOTS, channels), row, updated, full(SLOTS, COLUMNS), full(SLOTS), tracked, torch.tensor(0), own)


@pytest.mark.parametrize("fill", [0.0, 1.0])
@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize(("channels", "clips"), [(1, 1), (5, 5), (1, 3)])
@pytest.mark.parametrize(("deviation", "searched", "remembers"), [(math.nan, False, False), (0.25, True, True)])
def test_the_library_writes_what_pytorch_would(
    channels: int, clips: int, tracks: bool, fill: float, deviation: float, searched: bool, remembers: bool
) -> None:
    generator = torch.Generator().manual_seed(7)
    native_rows, plain_rows = buffers(channels, tracks, fill), buffers(channels, tracks, fill)
    for slot in (0, 3, 7, 3):
        clip = torch.rand(clips, generator=generator).reshape(1, -1, 1, 1)
        remember = torch.rand(clips, generator=generator) if remembers else None
        entry = Entry(clip, remember, searched, 41 + slot, 0.1, deviation, (math.nan,), 0.3)
        NATIVE.write(native_rows, slot, entry)
        PLAIN.write(plain_rows, slot, entry)
    for name, left, right in zip(State._fields, native_rows, plain_rows, strict=True):
        assert (left is None and right is None) or torch.equal(left, right), name


def test_a_row_leaves_the_others_alone() -> None:
    rows = buffers(2, True, 0.5)
    NATIVE.write(rows, 2, Entry(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), True, 9, 0.0, 0.0, (0.0,), 0.1))
    others = [0, 1, 3, 4, 5, 6, 7]
    for name, buffer in zip(State._fields[:-2], rows, strict=False):
        assert buffer is not None
        assert (buffer[others] == (0 if name == "updated_at" else 0.5)).all(), name
    assert rows.clip[2].tolist() == [1.0, 2.0] and rows.updated_at[2] == 9 and rows.observed[2, CLIP] == 4.0


def settings(role: str = "input", policy: str = "propagate") -> Settings:
    return Settings(TensorRule(), role, "conv1", policy, observe_every=1, momentum=0.1)


@pytest.mark.parametrize("steps", [NATIVE, PLAIN], ids=["cpu", "reference"])
def test_what_other_ranks_have_yet_to_hear_of(steps: Any) -> None:
    rows, moment = buffers(1, False, 0.0), Moment(torch.tensor(0), 3, True)
    for numbers in ([[1.0, 2.0]], [[math.nan, 1.0]], [[127.0, -4.0]], [[math.inf, 1.0]]):
        steps.step(torch.tensor(numbers), rows, settings(), None, moment)
    # The last finite tensor of the slot counts: x·x̂ = x̂·x̂ = x·x = 127² + 4².
    assert rows.unshared[3].tolist() == [16145.0, 16145.0, 16145.0, 1.0, 0.0]
    assert rows.unshared[0].tolist() == [0.0, 0.0, 0.0, 0.0, 2.0] and int(rows.nonfinite) == 2
    assert int(rows.unshared.count_nonzero()) == 5


def test_diagnostics_of_a_rule_have_columns_of_their_own() -> None:
    """The first has the column that the second paper's share of Gaussian channels always had, the others follow."""
    rows = buffers(1, False, 0.0)._replace(observed=torch.zeros(SLOTS, COLUMNS + 2))
    for steps in (NATIVE, PLAIN):
        steps.write(rows, 1, Entry(torch.tensor([3.0]), None, False, 0, 0.5, 0.25, (0.1, math.nan, 0.75), 0.1))
        assert rows.observed[1].tolist() == pytest.approx([0.5, 0.25, 0.1, 3.0, 0.0, 0.0, 0.75])


@pytest.mark.parametrize("name", ["clip", "initialized", "updated_at", "observed", "seen", "tracked"])
def test_buffers_that_are_not_dense_are_written_as_such(name: str) -> None:
    """load_state_dict(assign=True) puts a checkpoint's tensors there, whatever their layout."""
    dense, strided = buffers(2, True, 0.5), buffers(2, True, 0.5)
    buffer = getattr(strided, name)
    wide = torch.stack([buffer, buffer], dim=-1)
    strided = strided._replace(**{name: wide[..., 0]})
    entry = Entry(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), True, 9, 0.1, 0.2, (0.3,), 0.1)
    for rows in (dense, strided):
        NATIVE.write(rows, 5, entry)
    assert all(torch.equal(left, right) for left, right in zip(dense, strided, strict=True))  # type: ignore[arg-type]
    assert torch.equal(wide[..., 1], buffer), "what lies between them is somebody else's"


@pytest.mark.parametrize("slot", [SLOTS, SLOTS + 100])
def test_a_slot_that_is_not_there_is_refused(slot: int) -> None:
    with pytest.raises(IndexError):
        NATIVE.write(buffers(2, True, 0.5), slot, Entry(torch.ones(2), torch.ones(2), True, 9, 0.1, 0.2, (0.3,), 0.1))


@pytest.mark.parametrize(("channels", "clips"), [(1, 1), (5, 5), (1, 4)])
def test_a_clip_that_is_nan_is_written_down_wherever_it_stands(channels: int, clips: int) -> None:
    for at in range(clips):
        clip = torch.arange(1.0, clips + 1.0)
        clip[at] = math.nan
        native_rows, plain_rows = buffers(channels, True, 0.5), buffers(channels, True, 0.5)
        entry = Entry(clip, clip, False, 0, 0.0, 0.0, (0.0,), 0.1)
        NATIVE.write(native_rows, 1, entry)
        PLAIN.write(plain_rows, 1, entry)
        assert native_rows.observed[1, CLIP].isnan()
        for left, right in zip(native_rows, plain_rows, strict=True):
            assert left is not None and right is not None
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
