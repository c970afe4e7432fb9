# SPDX-License-Identifier: Apache-2.0
"""Norms that also apply an activation, such as timm's BatchNormAct2d.

Such a class derives from BatchNorm2d and overrides forward. Its own graph shows what it is: a call of F.batch_norm, then
modules that do nothing (an Identity, a DropBlock with probability 0), then at most one activation. No class is known by name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import fx, nn

from byteback.convert.graph.tracing import graph_of


class NormGraph(NamedTuple):
    """The graph of a norm that overrides forward, and its call of F.batch_norm."""

    graph: fx.Graph
    norm: fx.Node


def norm_graph(norm: nn.Module, training: bool) -> NormGraph | None:
    """Returns the graph of a module that begins with F.batch_norm; None if it does something else.

    >>> class NormReLU(nn.BatchNorm2d):
    ...     def forward(self, x):
    ...         y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
    ...         return F.relu(y)
    >>> [node.name for node in norm_graph(NormReLU(8), True).graph.nodes][-2:]
    ['relu', 'output']
    """
    try:
        graph = graph_of(norm, training)
    except Exception:  # of the user's forward
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is F.batch_norm]
    if len(inputs) != 1 or len(calls) != 1 or calls[0].args[:1] != (inputs[0],):
        return None
    return NormGraph(graph, calls[0])


def after_norm(norm: nn.Module) -> nn.Module | None:
    """Returns what a norm does in evaluation after F.batch_norm, as a module; None for an ordinary norm."""
    found = None if type(norm).forward is nn.BatchNorm2d.forward else norm_graph(norm, False)
    if found is None:
        return None
    graph, call = found
    call.replace_all_uses_with(call.args[0])  # type: ignore[arg-type]
    graph.erase_node(call)
    for node in reversed(list(graph.nodes)):  # its parameters
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return fx.GraphModule(norm, graph)
