# SPDX-License-Identifier: Apache-2.0
"""Classifies the nodes of a graph: convolution, norm, add of a residual, activation, or something else."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from byteback.convert.graph.norm_act import norm_graph
from byteback.convert.graph.tracing import CONVOLUTIONS, TRANSPOSED, Structure, Trace, copy_of, watched_after, watched_before
from byteback.nn import FusedConvolution, Int8Layer
from byteback.nn.fused.activations import BY_MODULE, BY_TARGET, misfit_of_call, misfit_of_module
from byteback.nn.layers.block_module import BlockModule
from byteback.nn.layers.computed import convolutions_of
from byteback.nn.layers.frozen_norm import is_frozen_norm
from byteback.nn.layers.subclass import overrides_forward

_NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
_PLAIN_FORWARDS = {norm.forward for norm in _NORMS.values()}
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_METADATA = ("size", "dim", "ndimension", "numel", "stride", "is_contiguous", "get_device")


class Tail(NamedTuple):
    """What a norm that overrides forward does after F.batch_norm."""

    activation: str  # "none" if there is none
    module: str | None  # the name of the activation's module
    reader: str | None  # a description of what else is applied inside the norm, which no block can include


class Nodes:
    """One graph, with the name and the module of each of its nodes."""

    def __init__(self, trace: Trace, structure: Structure) -> None:
        self.trace, self.structure = trace, structure
        self.tails: dict[fx.Node, Tail | None] = {}
        self.order = {node: number for number, node in enumerate(structure.graph.nodes)}
        self.names: dict[fx.Node, str] = {}
        self.modules: dict[fx.Node, nn.Module] = {}
        for node in self.order:
            if node.op == "call_module":
                self.modules[node] = structure.module.get_submodule(str(node.target))
                self.names[node] = trace.names[self.modules[node]]
        self.depth: dict[fx.Node, int] = {}  # convolutions on the longest way to a node
        for node in self.order:
            self.depth[node] = max((self.depth[one] for one in node.all_input_nodes), default=0) + self.is_conv(node)

    def only_user(self, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Returns the single user of a value (None if there is not exactly one), and the value that this user receives.

        Skips nn.Identity. A value that a hook reads has no single user.
        """
        while len(node.users) == 1 and not (node in self.modules and watched_after(self.modules[node])):
            user = next(iter(node.users))
            if user in self.modules and watched_before(self.modules[user]):
                break
            if not self.is_identity(user):
                return node, user
            node = user
        return node, None

    def is_conv(self, node: fx.Node) -> bool:
        return isinstance(self.modules.get(node), CONVOLUTIONS)

    def is_depthwise(self, node: fx.Node) -> bool:
        """Whether a convolution does not sum over channels."""
        conv: Any = self.modules.get(node)
        return 1 < conv.groups == conv.in_channels == conv.out_channels

    def reads_int8(self, node: fx.Node) -> bool:
        return isinstance(self.modules.get(node), (*CONVOLUTIONS, *TRANSPOSED))

    def is_identity(self, node: fx.Node) -> bool:
        return type(self.modules.get(node)) is nn.Identity and len(node.args) == 1

    def is_norm(self, node: fx.Node, value: fx.Node, conv: nn.Module) -> bool:
        module = self.modules.get(node)
        if module is None or node.args != (value,) or node.kwargs or "forward" in module.__dict__:
            return False
        if isinstance(conv, nn.Conv2d) and is_frozen_norm(module, conv.out_channels):
            return True
        base = next(norm for kind, norm in _NORMS.items() if isinstance(conv, kind))
        if not isinstance(module, base) or module.num_features != conv.out_channels:
            return False
        return _float_class(module).forward is base.forward or self.tail(node) is not None

    def tail(self, node: fx.Node) -> Tail | None:
        """Returns what the norm of a node does after F.batch_norm; None for an ordinary norm, or if it cannot be traced."""
        if node not in self.tails:
            self.tails[node] = self._tail(self.modules[node])
        return self.tails[node]

    def _tail(self, norm: nn.Module) -> Tail | None:
        overrides = isinstance(norm, tuple(_NORMS.values())) and _float_class(norm).forward not in _PLAIN_FORWARDS
        found = norm_graph(norm, self.trace.training) if overrides else None
        if found is None:
            return None
        inner = Nodes(self.trace, Structure(self.trace.names[norm], norm, found.graph))
        value, user = inner.only_user(found.norm)
        kind = inner.activation(user, value) if user is not None else None
        module = inner.names.get(user) if kind and user is not None else None
        if kind and user is not None:
            value, user = inner.only_user(user)
        reader = None if user is not None and user.op == "output" else "several places" if user is None else inner.label(user)
        return Tail(kind or "none", module, reader)

    def activation(self, node: fx.Node, value: fx.Node) -> str | None:
        """Returns the name of an activation applied to `value`; None if the node is something else or has no fused form."""
        if not node.args or node.args[0] is not value or self.misfit(node):
            return None
        module = self.modules.get(node)
        if module is None:
            return BY_TARGET.get(node.target) if _is_call(node) else None
        base = _activation_class(module)
        if base is None or "forward" in module.__dict__ or _float_class(module).forward is not base.forward:
            return None
        return BY_MODULE[base]

    def misfit(self, node: fx.Node) -> str | None:
        """Returns the argument that an activation of this name has no fused form with; None if there is none."""
        module = self.modules.get(node)
        if module is None:
            return misfit_of_call(node.target, node.args[1:], node.kwargs)
        base = _activation_class(module)
        return None if base is None else misfit_of_module(base, module)

    def is_residual(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether a node adds to `value` another tensor that, as far as the graph shows, has the same shape."""
        left, right = _addends(node)
        if left is None or right is None or left is right or value not in (left, right):
            return False
        if node.target in (operator.iadd, "add_") and value is not left:
            return False  # the result would have to be written into the other tensor
        other = right if value is left else left
        if other.op == "get_attr" or _is_metadata(other):
            return False
        (mine, pooled), (others, other_pooled) = self.extent(value), self.extent(other)
        return pooled == other_pooled and (mine == others or None in (mine, others))

    def extent(self, node: fx.Node | None) -> tuple[int | None, bool]:
        """Returns the channels of a value, if they are known, and whether it was averaged over its pixels."""
        channels = None
        while isinstance(node, fx.Node):
            module = self.modules.get(node)
            if isinstance(module, CONVOLUTIONS):
                channels = channels or module.out_channels
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                channels = channels or module.num_features
            elif "adaptive" in self.kind(node).lower() or (_is_call(node) and node.target in ("mean", torch.mean)):
                return channels, True
            elif not (self.is_identity(node) or (node.args and self.activation(node, node.args[0]))):  # type: ignore[arg-type]
                break
            node = node.args[0] if node.args else None  # type: ignore[assignment]
        return channels, False

    def changed_meanwhile(self, conv: fx.Node, last: fx.Node) -> str | None:
        """Returns what writes to the input of a convolution between its call and the end of its block; None if nothing does."""
        for x in conv.all_input_nodes:
            for user in x.users:
                if self.order[conv] < self.order[user] < self.order[last] and self.writes(user, x):
                    return self.label(user)
        return None

    def writes(self, node: fx.Node, x: fx.Node) -> bool:
        if not node.args or node.args[0] is not x:
            return False
        if node in self.modules:
            return bool(getattr(self.modules[node], "inplace", False))
        name = str(getattr(node.target, "__name__", node.target))
        in_place = (name.endswith("_") and not name.endswith("__")) or node.target in (operator.iadd, operator.setitem)
        return in_place or bool(node.kwargs.get("inplace", False))

    def takers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yields the nodes that read a value. Skips nn.Identity and nodes that only read the shape."""
        for user in node.users:
            if self.is_identity(user):
                yield from self.takers(user)
            elif not _is_metadata(user):
                yield user

    def is_pool(self, node: fx.Node) -> bool:
        """Whether a node is a max-pool, or selects some of the pixels, and returns nothing else."""
        module = self.modules.get(node)
        if type(module) is nn.AvgPool2d and "forward" not in module.__dict__:
            return module.kernel_size in (1, (1, 1))
        if module is not None:
            return type(module) is nn.MaxPool2d and not module.return_indices and "forward" not in module.__dict__
        if _is_call(node) and node.target is F.avg_pool2d:
            return (node.args[1] if len(node.args) > 1 else node.kwargs.get("kernel_size")) in (1, (1, 1))
        return (
            _is_call(node)
            and node.target in (F.max_pool2d, torch.max_pool2d)
            and not node.kwargs.get("return_indices", False)
            and len(node.args) < 7
        )

    def is_join(self, node: fx.Node) -> bool:
        """Whether a node concatenates channels."""
        if not _is_call(node) or node.target not in (torch.cat, torch.concat, torch.concatenate):
            return False
        return bool((node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) == 1)

    def is_unknown(self, node: fx.Node) -> bool:
        """Whether a node may contain or lead to convolutions that the graph does not show."""
        if node.op == "output":
            return bool(self.structure.name)
        inside = self.modules[node].modules() if node in self.modules else ()
        return any(isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)) for module in inside)

    def label(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"outside of {self.structure.name}" if self.structure.name else "output"
        if node in self.modules:
            return f"{'conv' if self.is_conv(node) else self.kind(node)} {self.names[node]}"
        return "add" if is_sum(node) else self.kind(node)

    def kind(self, node: fx.Node) -> str:
        """Returns the name of the class or function of a node."""
        if node in self.modules:
            return type(self.modules[node]).__name__
        return str(getattr(node.target, "__name__", node.target)).strip("_")


def why_not_fused(conv: nn.Module) -> str | None:
    """Returns why a convolution cannot start any block; None if it can."""
    own = overrides_forward(_float_class(conv))
    if "forward" in conv.__dict__ or (own and convolutions_of(copy_of(conv)) != "last"):
        return f"a {type(conv).__name__} that overrides forward"
    if conv._forward_pre_hooks and "weight" not in conv._parameters:
        return "a hook computes its weight (parametrizations of torch.nn.utils.parametrize are fused)"
    return "a hook reads its output" if watched_after(conv) else None


def _float_class(module: nn.Module) -> Any:
    """Returns the class that a layer had before `prepare`."""
    return type(module).float_class if isinstance(module, (Int8Layer, FusedConvolution, BlockModule)) else type(module)


def is_sum(node: fx.Node) -> bool:
    return _is_call(node) and node.target in _SUMS


def _is_call(node: fx.Node) -> bool:
    """Whether a node is a function or a method. Modules and inputs may have the same names."""
    return node.op in ("call_function", "call_method")


def _addends(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    if not is_sum(node):
        return None, None
    options = dict(node.kwargs)
    terms = (*node.args, *((options.pop("other"),) if "other" in options else ()))
    if options.pop("alpha", 1) != 1 or options or len(terms) != 2:
        return None, None
    left, right = terms
    return (left, right) if isinstance(left, fx.Node) and isinstance(right, fx.Node) else (None, None)


def _activation_class(module: nn.Module) -> type[nn.Module] | None:
    """Returns the first class of a module that is an activation."""
    return next((base for base in type(module).__mro__ if base in BY_MODULE), None)


def _is_metadata(node: fx.Node) -> bool:
    """Whether a node is the shape or other metadata of a value, or an item of it."""
    while node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.op == "call_method":
        return node.target in _METADATA
    return node.op == "call_function" and node.target is getattr and node.args[1] not in ("data", "T", "mT", "real")
