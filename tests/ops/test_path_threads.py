# SPDX-License-Identifier: Apache-2.0
"""`with path(...)` belongs to the thread that opens it, and to the threads that autograd runs its backward pass in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback.ops.backends import paths

FASTEST, OTHER = paths.available()[0], "reference"
pytestmark = pytest.mark.skipif(FASTEST == OTHER, reason="needs two paths")


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread of its own."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(work()))
    thread.start()
    thread.join(timeout=30)
    return made[0]


def test_blocks_of_two_threads_that_overlap_stay_apart() -> None:
    entered, may_leave = threading.Event(), threading.Event()
    seen = {}

    def second() -> None:
        with byteback.path("generic"):
            entered.set()
            assert may_leave.wait(30)
            seen["second"] = paths.current()
        seen["second after"] = paths.current()

    thread = threading.Thread(target=second)
    with byteback.path("reference"):
        thread.start()
        assert entered.wait(30)
        seen["first"] = paths.current()
    seen["first after"] = paths.current(), paths.is_chosen()  # the other thread's block is still open
    may_leave.set()
    thread.join()
    assert seen == {
        "first": "reference",
        "first after": (FASTEST, False),
        "second": "generic",
        "second after": FASTEST,
    }


def test_many_threads_that_open_blocks_all_the_time_see_their_own() -> None:
    wrong: list[tuple[str, str]] = []

    def work(name: str) -> None:
        for _ in range(2000):
            with byteback.path(name):
                if paths.current() != name:
                    wrong.append((name, paths.current()))

    threads = [threading.Thread(target=work, args=(name,)) for name in paths.available() * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert paths.current() == FASTEST and not paths.is_chosen()


def test_a_thread_begins_without_a_choice_and_leaves_others_theirs() -> None:
    with byteback.path(OTHER):
        assert in_thread(paths.current) == FASTEST and not in_thread(paths.is_chosen)
        assert paths.current() == OTHER and paths.is_chosen()


def test_the_threads_of_a_data_loader_leave_the_path_alone() -> None:
    class Data(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            with byteback.path("generic"):
                return torch.tensor(float(index))

    with byteback.path(OTHER):
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
            assert paths.current() == OTHER and batch.shape == (2,)


class Nested(torch.autograd.Function):
    """Its backward pass runs another one, `depth` levels deep; beyond 60 autograd goes on in a thread of its own."""

    seen: tuple[int, str, bool] = (0, "", False)

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.depth == 0:
            Nested.seen = threading.get_ident(), paths.current(), paths.is_chosen()
        else:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()  # type: ignore[no-untyped-call]
        return grads[0], None


@pytest.mark.parametrize("depth", [0, 3, 70])
def test_backward_takes_the_path_that_it_is_called_under_in_whatever_thread_it_runs(depth: int) -> None:
    y = Nested.apply(torch.ones(1, requires_grad=True), depth)  # type: ignore[no-untyped-call]
    with byteback.path(OTHER):
        y.sum().backward()
    assert (Nested.seen[0] != threading.get_ident()) == (depth > 60)
    assert Nested.seen[1:] == (OTHER, True)


def test_backward_in_a_thread_of_the_users_takes_the_path_of_that_thread() -> None:
    torch.manual_seed(0)
    model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), "plain-int8")
    kernels = []

    def step() -> None:
        with byteback.path("generic"):
            model(torch.randn(2, 3, 9, 9)).sum().backward()
            kernels.append(paths.last_kernel())

    with byteback.path(OTHER):
        in_thread(step)
    assert kernels == ["generic/direct"]


def test_blocks_of_two_tasks_that_overlap_close_in_any_order() -> None:
    async def task(name: str, enter: float, leave: float) -> None:
        await asyncio.sleep(enter)
        with byteback.path(name):
            await asyncio.sleep(leave)

    async def both() -> None:
        await asyncio.gather(task("reference", 0.0, 0.02), task("generic", 0.01, 0.02))

    asyncio.run(both())
    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        with byteback.path("generic"):
            entered.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(30)
    assert paths.current() == FASTEST, "a block that was left must not come back while another thread has one open"
    release.set()
    thread.join()
