# SPDX-License-Identifier: Apache-2.0
"""The gradient of an activation with several readers, added where it is computed.

    x ─┬─ conv ─ … ─ conv ─ (+) ─►      backward: the add runs first. It leaves its gradient with x and returns None.
       └────────────────────┘           The first convolution runs last. It adds what waits to its grad_input and returns the
                                        sum. So autograd has one gradient and nothing to add.

`shared_gradient` is called in the forward pass of each reader that can do this, `take` and `give` in its backward pass. A
reader is the last one if autograd will not execute another one in the current backward pass, which autograd itself tells. So
a reader that this pass does not reach is not waited for, and a pass that fails leaves nothing for the next one. Hooks on x,
`retain_grad` and `torch.autograd.grad` see the whole sum, because it is what autograd receives. Gradients of other readers
are added by autograd.

The order of additions is that of arrival, which is autograd's order too. So the bits are those of autograd. An exception: if
a reader of another kind comes between three or more, autograd adds its gradient to the sum of the others.

A waiting tensor never passes through autograd, so it may have another form than x: the gradient of a residual is masked by
the activation when it is added, and is not written before.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

_current_pass = torch._C._current_graph_task_id
_OUTSIDE = -1  # of all backward passes
_will_run = torch._C._will_engine_execute_node
_KEY = "byteback_shared_gradient"

enabled = True
"""If False, autograd adds all gradients. Tests compare the two."""


class Waiting(NamedTuple):
    """A gradient that waits: g, or with a mask (ops/block.py) g where it is set, else 0. Nobody may write to it."""

    g: Tensor
    mask: Tensor | None


class _Pass:
    """What one backward pass has brought so far."""

    def __init__(self) -> None:
        self.arrived: set[int] = set()  # ids of readers, which live as long as the pass
        self.waiting: Waiting | None = None


class SharedGradient:
    """The readers of one activation, and the sum of those of their gradients that have arrived.

    It lives as long as the autograd node that computed the activation, and holds no reader alive.
    """

    def __init__(self) -> None:
        self._readers: list[weakref.ref[Any]] = []
        self._passes: dict[int, _Pass] = {}

    def add_reader(self, ctx: Any) -> None:
        self._readers = [ref for ref in self._readers if ref() is not None]  # checkpointing discards readers
        self._readers.append(weakref.ref(ctx))

    def take(self) -> Waiting | None:
        """Returns the sum of the gradients that have arrived in this backward pass, to which the caller adds its own."""
        state = self._passes.get(_current_pass()) if self._passes else None
        if state is None:
            return None
        waiting, state.waiting = state.waiting, None
        return waiting

    def will_wait(self, ctx: Any) -> bool:
        """Whether the gradient that the reader `ctx` is about to compute will wait for another reader, as the first one."""
        state = self._state(ctx)
        return state is not None and state.waiting is None and self._is_awaited(ctx, state)

    def give(self, ctx: Any, grad: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Returns what the reader `ctx` returns to autograd: `grad`, or None if it waits for a reader that will run.

        `grad` is the gradient of this reader and of all before it: `take` is called first. A mask is allowed after `will_wait`.
        """
        state = self._state(ctx)
        if state is None:
            return grad
        now = _current_pass()
        if not self._is_awaited(ctx, state):
            self._passes.pop(now, None)
            return grad
        state.arrived.add(id(ctx))
        state.waiting = Waiting(grad, mask)
        self._passes[now] = state
        return None

    def _state(self, ctx: Any) -> _Pass | None:
        """Returns the state of the current backward pass; None if readers do not wait for each other."""
        if len(self._readers) < 2 or not enabled:
            return None
        now = _current_pass()
        # Compiled autograd calls backward with another object, and must not get None.
        if now == _OUTSIDE or ctx not in [ref() for ref in self._readers]:
            return None
        return self._passes.get(now) or _Pass()

    def _is_awaited(self, ctx: Any, state: _Pass) -> bool:
        """Whether another reader than `ctx` will run in this backward pass."""
        for ref in self._readers:
            reader = ref()
            if reader is not None and reader is not ctx and id(reader) not in state.arrived and _will_run(reader):
                return True
        return False


def shared_gradient(node: Any, x: Tensor | None, ctx: Any) -> SharedGradient | None:
    """Makes the autograd node `ctx` a reader of x, which `node` has computed. Returns None if no operation has computed it."""
    if node is None:
        return None
    assert x is not None
    metadata: Any = node.metadata  # a dict; annotated as a method
    results = metadata.setdefault(_KEY, {})
    shared: SharedGradient | None = results.get(x.output_nr)
    if shared is None:
        shared = results[x.output_nr] = SharedGradient()
    shared.add_reader(ctx)
    return shared
