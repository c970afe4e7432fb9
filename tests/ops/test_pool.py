# SPDX-License-Identifier: Apache-2.0
"""The pool of buffers: a block comes back when its storage dies, never before, and idle ones are bounded."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from byteback.ops import pool

SIZE = (1 << 20, (1,))


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(pool, "smallest", 1 << 20)  # another test may have tuned malloc
    pool.release()
    yield
    pool.release()


def take() -> torch.Tensor:
    return pool.empty([SIZE[0]], SIZE[1], torch.float32)


def test_a_block_is_used_again_once_its_tensor_is_gone() -> None:
    x = take()
    address = x.data_ptr()
    del x
    assert pool.idle() == 4 << 20
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
    assert pool.idle() >= 4 << 20


def test_layout_dtype_and_small_tensors() -> None:
    x = pool.empty([4, 64, 56, 56], (200704, 1, 3584, 64), torch.float32)
    assert x.is_contiguous(memory_format=torch.channels_last) and x.shape == (4, 64, 56, 56)
    q = pool.empty_like(x, torch.int8)
    assert q.dtype == torch.int8 and q.stride() == x.stride()
    before = pool.held()
    assert pool.empty([10], (1,), torch.float32).numel() == 10 and pool.held() == before


def test_sizes_that_differ_a_little_share_a_block() -> None:
    address = pool.empty([1_000_000], (1,), torch.float32).data_ptr()
    assert pool.empty([990_000], (1,), torch.float32).data_ptr() == address


def test_idle_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "limit", 10 << 20)
    for size in range(1, 40):
        pool.empty([size << 18], (1,), torch.float32)
        assert pool.idle() <= 10 << 20


def test_autograd_may_add_in_place() -> None:
    """A pool that held a reference to the storage would force every accumulation of gradients into a new tensor."""
    x = take()
    assert torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2  # x, and the Python object made to ask


def test_a_tuned_malloc_keeps_all_but_the_largest_blocks() -> None:
    pool.leave_to_malloc()
    before = pool.held()
    small, large = take(), pool.empty([8 << 20], (1,), torch.float32)
    assert small.numel() == SIZE[0] and pool.held() == before + 4 * large.numel()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_fork_writes_into_memory_of_its_own() -> None:
    x = take().zero_()
    child = os.fork()
    if child == 0:
        x[0] = 7.0
        os._exit(0)
    os.waitpid(child, 0)
    assert float(x[0]) == 0.0


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
