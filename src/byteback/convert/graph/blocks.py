# SPDX-License-Identifier: Apache-2.0
"""Finds the blocks of a model in its graphs.

A stage is fused only if nothing else uses the output of the stage before it. This must be true in training, in evaluation, and
in every call of the convolution. For every convolution that does not start a block there is a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from byteback.convert.graph.nodes import Nodes, Tail, is_sum, why_not_fused
from byteback.convert.graph.tracing import CONVOLUTIONS, Structure, Trace, trace
from byteback.nn.fused.activations import WITH_MASK
from byteback.nn.fused.block import Block


@dataclass(frozen=True)
class Plan:
    """The result of `find_blocks`. Every convolution of the model is in one of the two dicts."""

    blocks: dict[str, Block]
    reasons: dict[str, str]


def find_blocks(model: nn.Module) -> Plan:
    """Returns the blocks of a model by the name of their convolution, and the reason for every convolution without one.

    >>> plan = find_blocks(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)))
    >>> [(block.conv, block.norm, block.activation, block.consumers) for block in plan.blocks.values()]
    [('0', '1', 'relu', ('conv 3',))]
    >>> plan.reasons
    {'3': "its output is the model's output"}
    """
    traces = [trace(model, training) for training in (True, False)]
    sites = [_sites(trace) for trace in traces]
    blocks: dict[str, Block] = {}
    reasons: dict[str, str] = {}
    for name in (name for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)):
        modes = [_one_of(found[name], "its {} calls are followed by different layers") for found in sites if name in found]
        result = _one_of(modes, "training and evaluation differ") if modes else _why_unseen(name, traces)
        if isinstance(result, str):
            reasons[name] = result
        else:
            # The graph of one mode is missing, so it is unknown what reads the result in that mode.
            unsure = any(name not in found and _failure(name, trace) for found, trace in zip(sites, traces, strict=True))
            blocks[name] = replace(result, feeds_conv=True, feeds_other=True) if unsure else result
    return Plan(blocks, reasons)


def _sites(trace: Trace) -> dict[str, list[Block | str]]:
    """Returns the block, or the reason against one, for each call of each convolution, by its name."""
    sites: dict[str, list[Block | str]] = {}
    for structure in trace.structures:
        for name, result in _Matcher(trace, structure).results():
            sites.setdefault(name, []).append(result)
    return sites


def _one_of(results: list[Block | str], otherwise: str) -> Block | str:
    """Merges results that differ only in what reads the output."""
    blocks = [result for result in results if isinstance(result, Block)]
    if not blocks:
        return results[0]
    if len(blocks) < len(results) or any(block.read_as(blocks[0]) != blocks[0] for block in blocks):
        return otherwise.format(len(results))
    return blocks[0].read_as(*blocks)


def _why_unseen(name: str, traces: list[Trace]) -> str:
    if not name:
        return "it is the whole model"
    failure = next((failure for trace in traces if (failure := _failure(name, trace))), None)
    return f"its module could not be traced: {failure}" if failure else "the forward of the model does not call it"


def _failure(name: str, trace: Trace) -> str | None:
    """Returns why the innermost untraceable module around `name` could not be traced; None if there is no such module."""
    around = [box for box in trace.failures if name == box or not box or name.startswith(f"{box}.")]
    return trace.failures[max(around, key=len)] if around else None


@dataclass(frozen=True)
class _Chain:
    """A call of a convolution, its norm, and their output."""

    conv: fx.Node
    norm: fx.Node | None
    value: fx.Node
    tail: Tail | None = None  # of a norm that also applies an activation

    @property
    def closed(self) -> bool:
        """Whether the norm ends the block."""
        return self.tail is not None and (self.tail.activation != "none" or self.tail.reader is not None)


class _Matcher:
    """Finds the blocks of one graph."""

    def __init__(self, trace: Trace, structure: Structure) -> None:
        self.nodes = Nodes(trace, structure)

    def results(self) -> Iterator[tuple[str, Block | str]]:
        """Yields the block, or the reason against one, for each call of a convolution."""
        calls = [node for node in self.nodes.order if self.nodes.is_conv(node)]
        refused = {node: reason for node in calls if (reason := why_not_fused(self.nodes.modules[node]))}
        chains = [self.chain(node) for node in calls if node not in refused]
        owners = self.owners(chains)
        yield from ((self.nodes.names[node], reason) for node, reason in refused.items())
        for chain in chains:
            yield self.nodes.names[chain.conv], self.block(chain, owners)

    def chain(self, conv: fx.Node) -> _Chain:
        """Returns the convolution, with the norm if one follows."""
        value, user = self.nodes.only_user(conv)
        if user is not None and self.nodes.is_norm(user, value, self.nodes.modules[conv]):
            return _Chain(conv, user, user, self.nodes.tail(user))
        return _Chain(conv, None, conv)

    def owners(self, chains: list[_Chain]) -> dict[fx.Node, _Chain]:
        """Returns the block that each sum belongs to.

        If both operands end a block, it is the one with more convolutions on its path (not the shortcut), or else the left one.
        """
        claims: dict[fx.Node, list[tuple[int, bool, _Chain]]] = {}
        for chain in (chain for chain in chains if not chain.closed):
            value, user = self.nodes.only_user(chain.value)
            if user is not None and self.nodes.is_residual(user, value):
                is_left = value is user.args[0]
                claims.setdefault(user, []).append((self.nodes.depth[value], is_left, chain))
        return {node: max(claim, key=lambda rank: rank[:2])[2] for node, claim in claims.items()}

    def block(self, chain: _Chain, owners: dict[fx.Node, _Chain]) -> Block | str:
        """Returns the block that starts with a chain, or why there is none."""
        last, ends = chain.value, "norm" if chain.norm else "conv"
        if chain.closed:
            return self.closed_block(chain, owners)
        value, user = self.nodes.only_user(last)
        adds = user is not None and owners.get(user) is chain
        if user is not None and adds:
            last, ends = user, "add"
            value, user = self.nodes.only_user(last)
        activation = "none"
        module = None
        kind = self.nodes.activation(user, value) if user is not None else None
        if user is not None and kind and (not adds or kind in WITH_MASK):
            last, ends, activation, module = user, "activation", kind, self.nodes.names.get(user)
        if ends == "conv":
            return self.why_alone(chain.conv, owners)
        changed = self.nodes.changed_meanwhile(chain.conv, last)
        if changed:
            return f"its input is modified in place ({changed}) before the end of the block"
        return self.made(chain, adds, activation, module, ends, self.read_by(last, owners))

    def closed_block(self, chain: _Chain, owners: dict[fx.Node, _Chain]) -> Block | str:
        """Returns the block of a convolution and a norm that also applies an activation, or something that is not fused."""
        assert chain.tail is not None
        activation, module, reader = chain.tail
        readers = self.read_by(chain.value, owners)
        if reader is not None:
            readers = {"consumers": (reader,), "feeds_conv": False, "feeds_other": True}
        return self.made(chain, False, activation, module, "norm" if activation == "none" else "activation", readers)

    def made(self, chain: _Chain, adds: bool, activation: str, module: str | None, ends: str, readers: dict[str, Any]) -> Block:
        return Block(
            conv=self.nodes.names[chain.conv],
            norm=self.nodes.names[chain.norm] if chain.norm else None,
            adds=adds,
            activation=activation,
            activation_module=module,
            ends=ends,  # type: ignore[arg-type]
            **readers,
        )

    def read_by(self, last: fx.Node, owners: dict[fx.Node, _Chain]) -> dict[str, Any]:
        """Returns what reads the result of a block, described and by kind."""
        takers = list(self.nodes.takers(last))
        consumers = tuple(dict.fromkeys(self.nodes.label(taker) for taker in takers))
        return {"consumers": consumers, **self.readers(takers, owners)}

    def readers(self, takers: list[fx.Node], owners: dict[fx.Node, _Chain]) -> dict[str, Any]:
        """What kinds of nodes read a value, and what kinds read the concatenations that it is a part of."""
        nodes = self.nodes
        joins = [taker for taker in takers if nodes.is_join(taker)]
        beyond = [reader for join in joins for reader in nodes.takers(join)]
        known = (nodes.reads_int8, nodes.is_pool, nodes.is_join, owners.__contains__)
        return {
            "feeds_conv": any(nodes.reads_int8(taker) or nodes.is_unknown(taker) for taker in takers),
            "feeds_dense": any(nodes.is_conv(taker) and not nodes.is_depthwise(taker) for taker in takers),
            "feeds_other": any(not any(is_one(taker) for is_one in known) for taker in takers),
            "feeds_pool": any(nodes.is_pool(taker) for taker in takers),
            "feeds_join": bool(joins),
            "join_feeds_conv": any(nodes.reads_int8(reader) or nodes.is_unknown(reader) for reader in beyond),
            "join_feeds_other": any(not (nodes.reads_int8(reader) or nodes.is_join(reader)) for reader in beyond),
            "feeds_add": any(taker in owners for taker in takers),
        }

    def why_alone(self, conv: fx.Node, owners: dict[fx.Node, _Chain]) -> str:
        """Returns why no layer after a convolution can be fused with it."""
        takers = list(self.nodes.takers(conv))
        if not takers:
            return "its output is not used"
        labels = list(dict.fromkeys(self.nodes.label(taker) for taker in takers))
        if len(takers) > 1:
            return f"its output goes to {len(takers)} places: {', '.join(labels[:4])}{', ...' if len(labels) > 4 else ''}"
        (taker,), name = takers, self.nodes.structure.name
        if taker.op == "output":
            return f"its output leaves {name}, which could only be traced alone" if name else "its output is the model's output"
        if self.nodes.only_user(conv)[1] is None:
            return f"followed by {labels[0]}, but its output is also read by a hook or for its shape"
        if taker in owners:
            return f"the sum after it belongs to the block of {self.nodes.names[owners[taker].conv]}"
        if is_sum(taker):
            return "the sum after it does not add another tensor of the same shape, or is written into the other tensor"
        if isinstance(self.nodes.modules.get(taker), nn.modules.batchnorm._BatchNorm):
            return f"followed by {labels[0]}, which does not match it or overrides forward"
        misfit = self.nodes.misfit(taker)
        return f"followed by {labels[0]}{f' with {misfit}' if misfit else ''}, which has no fused form"
