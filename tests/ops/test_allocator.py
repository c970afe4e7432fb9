# SPDX-License-Identifier: Apache-2.0
"""The pool of buffers: a block comes back when its storage dies, never before, and idle ones are bounded."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from byteback.ops.backends.cpu import allocator
from byteback.ops.backends.cpu import library as native_library
from byteback.ops.backends.cpu.addresses import CPU

SIZE = (1 << 20, (1,))
pytestmark = pytest.mark.skipif(native_library.native is None, reason="without the native library nothing is pooled")


@pytest.fixture(autouse=True)
def _clean() -> object:
    allocator.release()
    yield
    allocator.release()


def take() -> torch.Tensor:
    return allocator.empty([SIZE[0]], SIZE[1], torch.float32, CPU)


def test_a_block_is_used_again_once_its_tensor_is_gone() -> None:
    x = take()
    address = x.data_ptr()
    del x
    assert allocator.idle() == 4 << 20
    assert take().data_ptr() == address


@pytest.mark.parametrize("holder", ["view", "numpy", "saved", "detached"])
def test_whoever_holds_the_storage_keeps_the_block(holder: str) -> None:
    x = take().fill_(3.0).requires_grad_()
    address = x.data_ptr()
    holders = {"view": x[5:], "numpy": x.detach().numpy(), "saved": x * x, "detached": x.detach()}
    held = holders.pop(holder)
    del holders
    del x
    other = take().zero_()
    assert other.data_ptr() != address
    if holder == "saved":
        held.sum().backward()
    else:
        assert float(held[7]) == 3.0
    del held
    assert allocator.idle() >= 4 << 20


def test_layout_dtype_and_small_tensors() -> None:
    x = allocator.empty([4, 64, 56, 56], (200704, 1, 3584, 64), torch.float32, CPU)
    assert x.is_contiguous(memory_format=torch.channels_last) and x.shape == (4, 64, 56, 56)
    q = allocator.empty_like(x, torch.int8)
    assert q.dtype == torch.int8 and q.stride() == x.stride()
    before = allocator.held()
    assert allocator.empty([10], (1,), torch.float32, CPU).numel() == 10 and allocator.held() == before


def test_sizes_that_differ_a_little_share_a_block() -> None:
    address = allocator.empty([1_000_000], (1,), torch.float32, CPU).data_ptr()
    assert allocator.empty([990_000], (1,), torch.float32, CPU).data_ptr() == address


def test_blocks_of_other_sizes_lie_in_the_same_memory() -> None:
    """One heap for all sizes: what is free is joined again, and cut for the next."""
    parts = [allocator.empty([1 << 20], (1,), torch.float32, CPU) for _ in range(3)]
    first, held = parts[0].data_ptr(), allocator.held()
    parts.clear()
    whole = allocator.empty([3 << 20], (1,), torch.float32, CPU)
    assert whole.data_ptr() == first and allocator.held() == held
    del whole
    half = [allocator.empty([3 << 19], (1,), torch.int8, CPU) for _ in range(8)]
    assert allocator.held() == held and allocator.idle() == 0
    assert sorted(part.data_ptr() - first for part in half) == [i * (3 << 19) for i in range(8)]


def test_a_block_is_cut_from_the_smallest_range_that_holds_it() -> None:
    sizes = [8, 1, 2, 1, 4, 1]  # MB; the second, fourth and sixth stay and keep the others apart
    blocks = [allocator.empty([size << 18], (1,), torch.float32, CPU) for size in sizes]
    places = {size: block.data_ptr() for size, block in zip(sizes, blocks, strict=True)}
    kept = blocks[1::2]
    del blocks
    for size in (2, 4, 8):
        assert allocator.empty([size << 18], (1,), torch.float32, CPU).data_ptr() == places[size]
    assert allocator.empty([3 << 18], (1,), torch.float32, CPU).data_ptr() == places[4]
    assert len(kept) == 3


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not tell")
def test_released_memory_goes_back_to_the_system() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * mmap.PAGESIZE

    kept = allocator.empty([1 << 20], (1,), torch.float32, CPU).fill_(1.0)
    x = allocator.empty([64 << 18], (1,), torch.float32, CPU).fill_(1.0)
    before = resident()
    del x
    allocator.release()
    assert resident() < before - (56 << 20) and allocator.idle() == 0
    assert (kept == 1.0).all()  # of the same mapping
    assert allocator.empty([64 << 18], (1,), torch.float32, CPU).sum() == 0.0  # new pages


def test_idle_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "limit", 10 << 20)
    for size in range(1, 40):
        allocator.empty([size << 18], (1,), torch.float32, CPU)
        assert allocator.idle() <= 10 << 20


def test_autograd_adds_gradients_in_place() -> None:
    """It does so only into a tensor whose storage nobody else holds, Python included; else every sum takes a new tensor."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return allocator.empty([1_000_000], (1,), torch.float32, CPU).fill_(2.0)

    x = torch.ones(1_000_000, requires_grad=True)
    middle = x * 1.0
    (Twice.apply(middle).sum() + Twice.apply(middle).sum()).backward()
    with torch.profiler.profile() as seen:
        middle = x * 1.0
        Twice.apply(middle).add(Twice.apply(middle)).sum().backward()
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts["aten::add"] == 1  # the forward's own
    assert x.grad is not None and x.grad[0] == 8.0


def test_several_threads() -> None:
    def work(seed: int) -> None:
        for i in range(200):
            x = take()
            x.fill_(float(seed * 1000 + i))
            if float(x[-1]) != float(seed * 1000 + i) or float(x[0]) != float(seed * 1000 + i):
                wrong.append(seed)

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_offered_no_longer_counts_and_is_used_again() -> None:
    if not hasattr(mmap, "MADV_FREE"):
        pytest.skip("this system has no MADV_FREE")
    x = take()
    address = x.data_ptr()
    del x
    assert allocator.idle() > 0
    allocator.offer()
    assert allocator.idle() == 0
    x = take()
    x.fill_(3.0)
    assert x.data_ptr() == address and float(x[-1]) == 3.0
    del x
    assert allocator.idle() > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_writes_to_memory_of_its_own() -> None:
    x = take().fill_(1.0)
    child = os.fork()
    if child == 0:
        x[:10] = 2.0
        os._exit(0)
    os.waitpid(child, 0)
    assert (x == 1.0).all()


def test_a_capsule_that_becomes_no_tensor_gives_its_block_back() -> None:
    library = native_library.native
    assert library is not None
    before = allocator.held()
    capsule = library.pool_lend((1 << 20,), (1,), 2, 32, allocator.limit)
    assert allocator.held() == before + (4 << 20)
    del capsule
    assert allocator.held() == before + (4 << 20) and allocator.idle() == 4 << 20


def test_a_block_comes_back_from_another_thread() -> None:
    held = [take()]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert allocator.idle() == 4 << 20


def test_wrong_sizes_are_refused_and_nothing_is_lost() -> None:
    library = native_library.native
    assert library is not None
    before = allocator.held()
    for shape, strides in (((4,), (1, 1)), (("a",), (1,)), ((1,) * 9, (1,) * 9), (4, 4)):
        with pytest.raises((TypeError, ValueError)):
            library.pool_lend(shape, strides, 2, 32, allocator.limit)
    assert allocator.held() == before


def test_sizes_whose_product_wraps_around_are_refused() -> None:
    """2^40 · 2^40 bytes are 0 in 64 bits: the block would be empty, and a kernel would write to it."""
    for shape in ((2**40, 2**40), (2**62, 4), (2**31, 2**31, 2**2)):
        with pytest.raises(MemoryError):
            allocator.empty(shape, (1,) * len(shape), torch.int8, CPU)
    with pytest.raises(ValueError, match="negative"):
        allocator.empty((-1, 2), (2, 1), torch.int8, CPU)


def test_strides_that_lead_out_of_the_block_are_refused() -> None:
    for strides in ((6, 2), (3, -1), (100, 1), (2**62, 1), (3, 2**62)):
        with pytest.raises(ValueError, match="strides"):
            allocator.empty((2, 3), strides, torch.float32, CPU)
    assert allocator.empty((2, 1, 3), (3, 2**62, 1), torch.float32, CPU).shape == (2, 1, 3)  # an axis of size 1 leads nowhere
    assert allocator.empty((0, 3), (3, 1), torch.float32, CPU).shape == (0, 3)
