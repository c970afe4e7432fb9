# SPDX-License-Identifier: Apache-2.0
"""Traces a model into graphs with torch.fx, without changing the model.

`torch.fx` does not trace into the layers of torch.nn, and this tracer does not trace into subclasses of convolutions, norms
and activations either. Code that cannot be traced (an `if` on the data, a dict of images) becomes a black box, and the rest is
still traced: the model as a whole if possible, or else each module inside it that can be traced alone.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import itertools
import operator
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from byteback.nn.fused.activations import BY_MODULE
from byteback.nn.layers.frozen_norm import has_frozen_name

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LEAVES = (*CONVOLUTIONS, *TRANSPOSED, nn.modules.batchnorm._BatchNorm, *BY_MODULE, nn.Identity)
_PLAIN = (type(None), bool, int, float, str)
_LISTS = (nn.ModuleList, nn.ModuleDict)  # they have no forward


@dataclass(frozen=True)
class Structure:
    """One graph, and the module whose forward was traced."""

    name: str  # in the model; "" is the whole model
    module: nn.Module
    graph: fx.Graph


@dataclass
class Trace:
    """The graphs of one model in one mode. No graph contains another."""

    training: bool
    names: dict[nn.Module, str]  # the first name of a module that has two
    structures: list[Structure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # why a module could not be traced, by its name
    opaque: set[nn.Module] = field(default_factory=set)  # black boxes: the modules inside have their own graphs

    def follow(self, module: nn.Module) -> list[Structure]:
        """Returns the graph of a module, or the graphs of the modules inside if it cannot be traced and becomes a black box."""
        if isinstance(module, _LISTS) and type(module).forward is nn.Module.forward:
            return self.follow_children(module)
        name, known = self.names[module], len(self.opaque)
        try:
            return [Structure(name, module, graph_of(module, self.training, self.opaque))]
        except Exception as error:
            failure = f"{type(module).__name__}: {_short(error)}"
        inside = self.follow_children(module)
        if len(self.opaque) > known:  # perhaps only a module inside could not be traced
            with contextlib.suppress(Exception):
                graph = graph_of(module, self.training, self.opaque)
                boxes = tuple(f"{self.names[box]}." for box in self.opaque)
                return [Structure(name, module, graph), *(other for other in inside if other.name.startswith(boxes))]
        self.failures[name] = failure
        self.opaque.add(module)
        return inside

    def follow_children(self, module: nn.Module) -> list[Structure]:
        stops_at, structures = Tracer().is_leaf_module, []
        for child in module.children():
            if child not in self.opaque and (isinstance(child, _LISTS) or not stops_at(child, "")):
                structures += self.follow(child)
        return structures


def trace(model: nn.Module, training: bool) -> Trace:
    """Traces a model in training mode or in eval mode."""
    found = Trace(training, {module: name for name, module in model.named_modules()})
    # A hook on a container must see complete tensors, so no graph crosses its boundary.
    watched = [
        module
        for module, name in found.names.items()
        if name and any(True for _ in module.children()) and (watched_before(module) or watched_after(module))
    ]
    found.opaque.update(watched)
    for root in (model, *watched):
        found.structures += found.follow(root)
    return found


class Tracer(fx.Tracer):
    """Does not trace into convolutions, norms and activations, their subclasses, and the modules named in `opaque`."""

    def __init__(self, opaque: Collection[str] = ()) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, _LEAVES) or has_frozen_name(m)
        return known or module_qualified_name in self.opaque or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Assumes that the condition of an `assert` is true (the trace_asserts of fx only knows the bytecode of Python 3.9)."""
        frame: Any = sys._getframe(2)  # past Proxy.__bool__
        coming = (step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti)
        jump, then, *_ = [step.opname for step in itertools.islice(coming, 3) if step.opname != "TO_BOOL"] + ["", ""]
        is_assert = "IF_TRUE" in jump and then in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")
        return is_assert or super().to_bool(obj)


class _Proxy(fx.Proxy):
    """Records `a += b` as an in-place add; fx would record `a + b`."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


def graph_of(module: nn.Module, training: bool | None = None, opaque: Collection[nn.Module] = ()) -> fx.Graph:
    """Returns the graph of the forward of a module, called with its default arguments. Errors of copying and tracing propagate.

    Tracing runs the user's forward, which may write to the module, so it runs on a new copy each time.
    """
    if "forward" in module.__dict__:
        raise TypeError("its forward was replaced on the instance")
    parameters = inspect.signature(type(module).forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and isinstance(p.default, _PLAIN)}
    boxes = {name for name, inner in module.named_modules() if inner in opaque}
    with _undisturbed():
        twin = copy_of(module)
        if training is not None:
            twin.train(training)
        return Tracer(boxes).trace(twin, concrete_args=defaults or None)


def copy_of(module: nn.Module) -> nn.Module:
    """Returns a copy that shares the weights and has no hooks, so that none of them runs."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    for inner in module.modules():
        memo.update({id(value): value for value in vars(inner).values() if isinstance(value, torch.Tensor)})  # set by a hook
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks, inner._backward_hooks, inner._backward_pre_hooks):
            memo[id(hooks)] = OrderedDict()
    return copy.deepcopy(module, memo)


def watched_before(module: nn.Module) -> bool:
    """Whether a hook reads the input of the module."""
    return bool(module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def watched_after(module: nn.Module) -> bool:
    """Whether a hook reads the output of the module."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Preserves random state and suppresses warnings: tracing runs the user's forward, which may draw numbers and warn."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _short(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
    return text if len(text) <= 100 else text[:97] + "..."
