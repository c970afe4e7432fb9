# SPDX-License-Identifier: Apache-2.0
"""LayerNumerics: the state of one int8 layer. It is a child module, so it is moved, copied and saved with the layer.

All state is in buffers of fixed shape. A checkpoint of the float network, which has none of these keys, loads with strict=True
and resets the state. A checkpoint with only some of the keys is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from byteback import ops
from byteback.ops.contract.limits import NUMERICS_VERSION
from byteback.ops.programs import Averaged
from byteback.quantize import Quantizer, Settings, TensorRule, columns_of, moved, new_unshared, register
from byteback.recipes import Recipe

GRADIENT_ROLES = ("grad_output", "grad_output_for_weight")


def signed64(seed: int) -> int:
    """Converts an unsigned 64-bit seed to int64.

    >>> signed64(2**64 - 1)
    -1
    """
    return (seed + 2**63) % 2**64 - 2**63


class LayerNumerics(nn.Module):
    """Noise counter, iteration and quantizers of one layer.

    seed, layer, count   identify the noise of the next gradient; count increases with every quantized gradient
    iteration            number of optimizer steps (of backward passes if no optimizer is connected)
    nonfinite            number of tensors with NaN or Inf

    As in a quantizer, `unshared` is not a buffer. It holds the flags of the weight, which has no quantizer (ops/refusals.py).
    """

    seed: Tensor
    layer: Tensor
    count: Tensor
    iteration: Tensor
    nonfinite: Tensor
    numerics_version: Tensor
    backwards = 0  # backward passes in this process
    stepped = False  # whether an optimizer's hook was seen in this process

    def __init__(
        self,
        recipe: Recipe,
        in_channels: int,
        out_channels: int,
        seed: int,
        layer: int,
        name: str,
        depthwise: bool = False,
        packs: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.initial = {
            **{"numerics_version": NUMERICS_VERSION, "seed": signed64(seed), "layer": layer},
            **{"count": 0, "iteration": 0, "nonfinite": 0},
        }
        for buffer, value in self.initial.items():
            self.register_buffer(buffer, torch.tensor(value, dtype=torch.int64, device=device))
        rule, own = recipe.grad_output_rule(depthwise), recipe.grad_output_for_weight
        self.input = _quantizer(recipe.input, in_channels, device, tracks=True)
        self.grad_output = _quantizer(rule, out_channels, device)
        self.grad_output_for_weight = _quantizer(own, out_channels, device) if own else None
        self.unshared = new_unshared(device)
        self.settings = _settings(recipe, rule, name, depthwise, packs and recipe.grad_weight)
        self._derive()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Creates new handles, because handles are only valid in one process."""
        super().__setstate__(state)
        if "unshared" not in self.__dict__:  # a pickle of an earlier version
            self.unshared = new_unshared(self.iteration.device)
        self._derive()

    def _derive(self) -> None:
        """Sets what depends on the settings: their handles, whether the input has the rule that blocks share, and whether both
        copies of a gradient can be quantized together."""
        self.shares_input = self.settings["input"].rule == TensorRule()  # compared once: this takes longer than it looks
        self.handles = {field: register(settings) for field, settings in self.settings.items()}
        one, each = self.settings["grad_output"].rule, self.settings["grad_output_for_weight"].rule
        together = (one.per, each.per) == ("tensor", "K") and one.clip == each.clip and one.rounding == each.rounding
        self.chooses_both = self.grad_output_for_weight is not None and together and type(one.clip.program()) is Averaged

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayerNumerics:
        """Moves with the model. Buffers that come from the meta device get the values of a new layer."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, value in self.initial.items():
            self._buffers[name] = moved(getattr(self, name), fn, value)
        self.unshared = moved(self.unshared, fn, 0)
        return self

    def noise_of(self, role: str, key: Tensor) -> Tensor | None:
        """Returns the noise key if the tensor is rounded stochastically, else None."""
        return key if self.settings[role].rule.rounding == "stochastic" else None

    def next_noise_key(self, rank: int, count_iteration: bool) -> Tensor:
        """Returns the noise key of this gradient and advances the counter, so that the next gradient gets another key."""
        count = self.count
        key = ops.noise_key(self.seed, self.layer, count, rank)
        count.add_(1)
        if count_iteration:
            self.iteration.add_(1)
        return key

    def reset(self) -> None:
        """Resets everything except the noise counter, so that the noise of an earlier gradient is never used again."""
        for quantizer in self.each():
            quantizer.reset()
        for counter in (self.iteration, self.nonfinite, self.unshared):
            counter.zero_()
        self.numerics_version.fill_(NUMERICS_VERSION)

    def gradients(self) -> list[Quantizer]:
        """Returns the quantizers of the copies of the gradient."""
        own: Any = self._modules  # faster than nn.Module.__getattr__
        return [copy for copy in map(own.get, GRADIENT_ROLES) if copy is not None]

    def each(self) -> list[Quantizer]:
        """Returns all quantizers: of the input, and of one or two copies of the gradient."""
        return [quantizer for quantizer in self._modules.values() if isinstance(quantizer, Quantizer)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        version = state_dict.get(prefix + "numerics_version")
        if version is not None and int(version) != NUMERICS_VERSION:
            warnings.warn(
                f"{prefix[:-1]}: the checkpoint has numerics version {int(version)}, but this build has {NUMERICS_VERSION}; "
                "training continues, but not with the same bits as with the old version.",
                stacklevel=2,
            )
            state_dict[prefix + "numerics_version"] = torch.full_like(version, NUMERICS_VERSION)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        for unshared in (self.unshared, *(quantizer.unshared for quantizer in self.each())):
            unshared.zero_()  # measurements of another run


def _quantizer(rule: TensorRule, channels: int, device: torch.device | None, tracks: bool = False) -> Quantizer:
    scales = channels if rule.per in ("C", "K") else 1
    columns = 1 + max(columns_of(rule).values())
    return Quantizer(rule.clip.entries(scales), tracks, device, columns)


def _settings(recipe: Recipe, grad_output: TensorRule, name: str, depthwise: bool, packs: bool) -> dict[str, Settings]:
    for_weight = "grad_output_for_weight" if recipe.grad_output_for_weight else "grad_output"
    rules = {
        "input": recipe.input,
        "weight": recipe.weight,
        "grad_output": grad_output,
        "grad_output_for_weight": recipe.grad_output_for_weight or grad_output,
    }
    return {
        field: Settings(
            rule=rule,
            role="grad_output" if field in GRADIENT_ROLES else field,
            layer=name,
            on_nonfinite=recipe.on_nonfinite,
            observe_every=recipe.observe_every,
            momentum=recipe.momentum,
            by_channel=depthwise and field in GRADIENT_ROLES,
            packs=packs and field in ("input", for_weight),
        )
        for field, rule in rules.items()
    }
