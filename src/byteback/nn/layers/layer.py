# SPDX-License-Identifier: Apache-2.0
"""Int8Layer: the base class of Int8Conv1d/2d/3d and Int8Linear.

`attach` converts a torch layer to int8 in place (same object, same parameters, same hooks) and `detach` converts it back. A
layer counts its calls within one forward of the prepared model, so that a module that is called several times has separate
statistics for each call.

Dtypes: weights are float32. The input is float32. Under autocast any floating point input is converted to float32, and the
output has the dtype of autocast, as with the torch layer.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from byteback.nn.autograd import Int8Product, Products
from byteback.nn.layers.calls import Shared, recomputing
from byteback.nn.layers.float_table import Geometry, why_float
from byteback.nn.layers.numerics import LayerNumerics
from byteback.nn.layers.transforms import refuse_script, refuse_transforms
from byteback.nn.layers.weights import Frozen, refuse_loading, refuse_training
from byteback.nn.quantizing import RECOMPUTED
from byteback.ops import quantizer
from byteback.ops.backends import paths
from byteback.quantize import CALL_SLOTS
from byteback.recipes import Recipe, resolve

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


OWN_ATTRIBUTES = (
    *("recipe", "enabled", "hooked", "scaling", "faster_in_float", "int8_name", "int8_shared", "int8_calls", "int8_frozen"),
    "int8_sites",
)
"""The attributes that `attach` sets on a layer, besides `quantizers`, which is a child module."""


class Scaling(Protocol):
    """Learning-rate scaling connected to a layer. It is disconnected when the layer becomes float or is connected again."""

    def drop(self, layer: Any) -> None: ...

    def release(self, layer: Any) -> None: ...

    def optimizer(self) -> Any: ...


class Int8Layer(_Base):
    """Mixin for a torch layer whose products run in int8."""

    recipe: Recipe
    quantizers: LayerNumerics
    weight: Tensor
    float_class: type[nn.Module]

    def attach(
        self,
        recipe: Recipe | str,
        *,
        seed: int,
        layer: int,
        name: str,
        shared: Shared | None = None,
    ) -> None:
        """Sets the recipe of the layer and creates its quantizers."""
        self.recipe = resolve(recipe)
        self.int8_name = name
        self.enabled = True
        self.hooked = False
        self.scaling: Scaling | None = None
        self.int8_shared = shared or Shared()
        self.int8_calls = 0
        self.int8_frozen: Frozen | None = None
        self.int8_sites: dict[Any, Any] = {}  # of its blocks (nn/fused/step.py)
        self.faster_in_float = None if self.recipe.strict else why_float(self.geometry())
        depthwise = self.is_depthwise()
        packs = not depthwise and len(self.geometry().kernel) > 0
        self.quantizers = LayerNumerics(self.recipe, *self.channels(), seed, layer, name, depthwise, packs, _device(self))

    def detach(self) -> None:
        """Converts the layer back to the torch layer."""
        del self.quantizers
        if self.scaling is not None:
            self.scaling.drop(self)
        for attribute in OWN_ATTRIBUTES:
            self.__dict__.pop(attribute, None)  # a layer that an earlier version has pickled lacks the youngest
        self.__dict__.pop("int8_block", None)
        self.__class__ = self.float_class  # type: ignore[assignment]

    def channels(self) -> tuple[int, int]:
        """Returns (C, K), the input and output channels."""
        raise NotImplementedError

    def geometry(self) -> Geometry:
        """Returns the properties of this layer that the float table uses."""
        raise NotImplementedError

    def shares_gradient(self) -> bool:
        """Whether grad_input also uses the per-channel copy of the gradient: in depthwise layers, which do not sum over K."""
        own = self.recipe.grad_output_for_weight
        return own is not None and own.per == "K" and self.recipe.depthwise_shares and self.is_depthwise()

    def is_depthwise(self) -> bool:
        """Whether each channel is convolved separately, so that no product sums over channels."""
        in_channels, out_channels = self.channels()
        return 1 < in_channels == out_channels == getattr(self, "groups", 1)

    def runs_int8(self, product: str | None = None) -> bool:
        """Whether the layer (or its "output", "grad_input" or "grad_weight") runs in int8 now. byteback.path implies strict."""
        if not self.enabled or (self.faster_in_float is not None and not paths.is_chosen()):
            return False
        return product is None or bool(getattr(self.recipe, product))

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a loaded model is not connected to an optimizer.
        return {**self.__dict__, "hooked": False, "scaling": None, "int8_sites": {}}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the layer. A frozen layer quantizes its weight again, because the weight may have changed."""
        if self.int8_frozen is not None:
            self.int8_frozen = Frozen()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Resets the quantizers if the checkpoint is of a float model. A checkpoint without this layer does not change them."""
        refuse_loading(self)
        if self.int8_shared.undo is not None:
            self.int8_shared.undo.forget()  # its copies belong to the old weights
        own = prefix + "quantizers."
        if not any(key.startswith(own) for key in state_dict):
            weight = state_dict.get(prefix + "weight")
            if weight is not None:
                if self.quantizers.seed.is_meta and local_metadata.get("assign_to_params_buffers", False):
                    self.quantizers.to_empty(device=weight.device)  # where the weight will be
                self.quantizers.reset()
            state_dict.update(self.quantizers.state_dict(prefix=own))  # so that strict=True finds all keys
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def run(self, x: Tensor, weight: Tensor, products: Products) -> Tensor:
        """Computes the product without bias, with the dtypes described above."""
        self.check_dtypes(x, weight)
        device = x.device.type
        slot, with_grad = self.next_slot(), torch.is_grad_enabled()
        if not torch.is_autocast_enabled(device):
            return Int8Product.apply(x, weight, self, products, slot, with_grad)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            output = Int8Product.apply(x.float(), weight, self, products, slot, with_grad)
        return output.to(dtype)

    def check_call(self, input: Tensor, weight: Tensor, fuses: bool = False) -> None:
        """Raises an error if the call cannot run in int8. If `fuses`, it runs as a block, so no transform is active."""
        if self.training and self.int8_frozen is not None:
            refuse_training(self, "it was called in training mode")
        if not fuses:
            refuse_transforms(self.int8_name, input, weight)

    def __prepare_scriptable__(self) -> None:
        refuse_script(self.int8_name)

    def check_dtypes(self, x: Tensor, weight: Tensor) -> None:
        """Raises an error if a dtype or a device does not fit an int8 product."""
        if weight.dtype is x.dtype is torch.float32 and weight.is_cpu and x.is_cpu:
            return
        if weight.dtype != torch.float32:
            raise TypeError(
                f"{self.int8_name}: weight is {weight.dtype}, but int8 training needs float32 master weights. "
                "Keep the model in float32 (model.float()) and use torch.autocast for the other layers."
            )
        if x.device != weight.device:
            raise RuntimeError(
                f"{self.int8_name}: input is on {x.device} and weight on {weight.device}, but both must be on the same "
                f"device. Move the input with .to({str(weight.device)!r})."
            )
        if x.dtype != torch.float32 and not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
            raise TypeError(
                f"{self.int8_name}: input is {x.dtype}, but int8 layers expect float32 (any floating point dtype under "
                "autocast). Call .float() on the input."
            )

    # ---- call slots ----

    def next_slot(self) -> int:
        if torch.compiler.is_compiling():
            if not self.int8_shared.counting:
                return 0
            ordinal = self.int8_calls
        else:
            if recomputing():
                return RECOMPUTED
            calls = self.int8_shared.calls
            if not calls.counting:
                return 0
            ordinals = calls.ordinals
            ordinal = ordinals.get(id(self), 0)
            ordinals[id(self)] = ordinal + 1
        self.__dict__["int8_calls"] = ordinal + 1  # nn.Module would search its parameters for the name
        return min(ordinal, CALL_SLOTS - 1)

    def backward_slot(self, slot: int) -> int:
        """Returns the slot of a backward pass. It is not known after reentrant checkpointing if there are several calls."""
        if slot != RECOMPUTED:
            return slot
        if self.int8_calls > 1:
            raise RuntimeError(
                f"{self.int8_name}: this layer is called {self.int8_calls} times in one forward and recomputed by reentrant "
                "checkpointing, so it is unknown to which call a gradient belongs. Use checkpoint(..., use_reentrant=False)."
            )
        return 0

    # ---- ranks and the optimizer ----

    def rank(self) -> int:
        """Returns the rank of this process: every rank uses different noise."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        return 0

    def learning_rate_factor(self) -> Any:
        """Returns φ of this layer, from the largest direction deviation of its calls. It is 1 if the recipe has no rule, before
        the first search, and if the layer falls back to float."""
        return factors([self])[0]

    def watch_for_hook(self) -> None:
        """Warns once if the recipe needs the hooks of an optimizer, but no step of an optimizer was seen."""
        numerics = self.quantizers
        numerics.backwards += 1
        if numerics.stepped or self.int8_shared.warned or not self.training:
            return
        if self.recipe.learning_rate is None and self.recipe.on_nonfinite != "skip":
            return
        passes, period = numerics.backwards - 1, self.recipe.grad_output.clip.search_period()
        if passes >= (max(2 * period, 20) if self.hooked else max(period, 2)):
            self.int8_shared.warned = True
            reason = f"no optimizer step was seen in {passes} backward passes" if self.hooked else "no optimizer is connected"
            warnings.warn(
                f"{self.int8_name}: {type(self.recipe).__name__} needs the optimizer (for learning-rate factors or skipped "
                f"steps), but {reason}, so training runs without them. Call "
                "byteback.scale_learning_rates(optimizer, model) with the optimizer whose step() you call.",
                stacklevel=3,
            )


def factors(layers: Sequence[Int8Layer]) -> list[Any]:
    """Returns φ of each layer: numbers, or tensors if reading them is slow."""
    scaled = [layer for layer in layers if layer.recipe.learning_rate is not None and layer.runs_int8()]
    numerics: list[Any] = [layer._modules["quantizers"] for layer in scaled]
    observed = [[copy._buffers["observed"] for copy in own.gradients()] for own in numerics]
    made = quantizer.factors(observed, [layer.recipe.learning_rate for layer in scaled])
    found = {id(layer): factor for layer, factor in zip(scaled, made, strict=True)}
    return [found.get(id(layer), 1.0) for layer in layers]


def _device(layer: nn.Module) -> torch.device | None:
    """Returns the device of the weight, or of what it is computed from."""
    return next((parameter.device for parameter in layer.parameters()), None)


def weight_number(weight: Tensor) -> int:
    """Returns 15 bits of a hash of a weight, so that layers of different models use different noise, the same in every run."""
    if weight.device.type == "meta" or weight.numel() == 0:
        return 0
    if hasattr(weight, "full_tensor"):  # sharded by FSDP2: every rank calls prepare, so all can gather the weight
        weight = weight.full_tensor()
    head = weight.detach().flatten()[:1024].to("cpu", torch.float32).contiguous()
    return zlib.crc32(head.numpy().tobytes()) & 0x7FFF
