# SPDX-License-Identifier: Apache-2.0
"""Recipe: frozen data that says how each tensor is quantized and which products run in int8.

    input, weight ──► output         grad_output ──► grad_input         grad_output_for_weight (or grad_output) ──► grad_weight

To write your own recipe, subclass it with other defaults or create it with other fields; `docs/3-clipping.md` has an example.
The scale rule is checked when a recipe is created, so an invalid recipe raises an error before any layer uses it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from byteback.ops.contract import scale_rule
from byteback.quantize import ClipRule, TensorRule
from byteback.suggestions import unknown

NONFINITE_POLICIES = ("raise", "skip", "propagate")
EVAL_CLIPS = ("tracked", "batch")
NORM_MEMORIES = ("float32", "bfloat16", "int8")
RESIDUAL_MEMORIES = ("float32", "int8")
STREAMS = ("float32", "bfloat16")


@dataclass(frozen=True)
class LearningRateRule:
    """Base class of rules that compute a factor on a layer's learning rate from its direction deviation."""

    def factor(self, deviation: float) -> float:
        """Returns the factor for a layer whose gradient has this `deviation`, 1 - cosine."""
        raise NotImplementedError(f"{type(self).__name__}.factor: a learning-rate rule must implement factor(deviation)")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Describes how a network trains in int8.

    input, weight, grad_output   how each operand is quantized
    grad_output_for_weight       a second copy of grad_output, used for grad_weight only; None uses one copy for both products
    depthwise_shares             use one copy of grad_output, with a scale per channel, for both backward products of depthwise
                                 convolutions (they sum over no channel), if the clip rule supports clips per channel
    learning_rate                a rule that scales the learning rate of each layer; None: every factor is 1
    output, grad_input, grad_weight   whether that product runs in int8; False computes it in float on unquantized operands
    strict                       True runs int8 also where float is faster; False falls back to float for the shapes that are
                                 listed in nn/layers/float_table.py
    first_conv, linear           whether the first convolution and the Linear layers run in int8 too (the first paper: no)
    on_nonfinite                 what to do if a tensor to quantize has NaN or Inf: "raise", "skip" (the whole step) or
                                 "propagate"
    eval_clip                    clip of inputs in eval mode: the one "tracked" in training, or one chosen for each "batch"
    momentum                     momentum of the tracked clip's exponential average
    norm_memory                  how a fused block saves the input of its norm for backward: "float32", "bfloat16" or "int8"
    residual_memory              the residual that a fused block adds: in "float32", or its "int8" copy, values · scale
    stream                       how floats travel between the products of fused blocks in training: in "float32", or rounded to
                                 "bfloat16"
    observe_every                iterations between two measurements of the direction deviation (`health`, `learning_rate`)
    """

    slug: ClassVar[str] = ""

    input: TensorRule = field(default_factory=TensorRule)
    weight: TensorRule = field(default_factory=TensorRule)
    grad_output: TensorRule = field(default_factory=lambda: TensorRule(rounding="stochastic"))
    grad_output_for_weight: TensorRule | None = None
    depthwise_shares: bool = True
    learning_rate: LearningRateRule | None = None
    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True
    strict: bool = False
    first_conv: bool = False
    linear: bool = False
    on_nonfinite: str = "raise"
    eval_clip: str = "tracked"
    momentum: float = 0.1
    observe_every: int = 10
    norm_memory: str = "int8"
    residual_memory: str = "float32"
    stream: str = "float32"

    def __post_init__(self) -> None:
        name = type(self).__name__
        for value, known, what in (
            (self.on_nonfinite, NONFINITE_POLICIES, "on_nonfinite"),
            (self.eval_clip, EVAL_CLIPS, "eval_clip"),
            (self.norm_memory, NORM_MEMORIES, "norm_memory"),
            (self.residual_memory, RESIDUAL_MEMORIES, "residual_memory"),
            (self.stream, STREAMS, "stream"),
        ):
            if value not in known:
                raise ValueError(f"{name}: {what} is {value!r}; choose one of {', '.join(known)}.")
        if self.learning_rate is not None and "__dataclass_fields__" not in type(self.learning_rate).__dict__:
            raise TypeError(
                f"{name}: learning_rate is {self.learning_rate!r}; it must be a LearningRateRule that is a frozen dataclass "
                "itself. Decorate its class with @dataclass(frozen=True)."
            )
        if not 0.0 < self.momentum <= 1.0 or self.observe_every < 1:
            raise ValueError(
                f"{name}: momentum is {self.momentum} and observe_every {self.observe_every}; momentum must be in (0, 1] and "
                "observe_every must be at least 1."
            )
        for role in ("input", "weight"):
            if getattr(self, role).rounding != "nearest":
                raise ValueError(
                    f"{name}: {role}.rounding is 'stochastic', but the forward pass must not use noise, so that predictions "
                    "are deterministic. Use rounding='nearest'."
                )
            if getattr(self, role).clip.looks_back:
                raise ValueError(
                    f"{name}: {role}.clip is {type(getattr(self, role).clip).__name__}, which depends on earlier "
                    "iterations; activation checkpointing may run a forward pass again, which must choose the same clip. "
                    "Use this rule for gradients only."
                )
        self._check_scale_rule()

    def grad_output_rule(self, depthwise: bool) -> TensorRule:
        """Returns the rule for `grad_output` in a layer. A depthwise convolution may use it with a scale per channel.

        It does if `depthwise_shares` is True, the clip rule supports it and `grad_output_for_weight` is None. If that is not
        None, both products share the second copy instead, if it varies along K.
        """
        rule = self.grad_output
        if not depthwise or not self.depthwise_shares or self.grad_output_for_weight is not None or not rule.clip.allows("K"):
            return rule
        return dataclasses.replace(rule, per="K")

    def operands(self, product: str) -> Iterator[tuple[str, str, TensorRule]]:
        """Yields (field of the recipe, name of the operand, its rule) for both operands of a product."""
        if product in ("output", "grad_weight"):
            yield "input", "input", self.input
        if product in ("output", "grad_input"):
            yield "weight", "weight", self.weight
        if product == "grad_input":
            yield "grad_output", "grad_output", self.grad_output
        if product == "grad_weight":
            own = self.grad_output_for_weight
            yield ("grad_output_for_weight" if own else "grad_output"), "grad_output", own or self.grad_output

    def _check_scale_rule(self) -> None:
        for product in ("output", "grad_input", "grad_weight"):
            if not getattr(self, product):
                continue
            for where, operand, rule in self.operands(product):
                if rule.per == "tensor":
                    continue
                why = None
                if rule.per not in scale_rule.AXES[operand]:
                    why = f"varies along {rule.per}, but {operand} has no such axis"
                why = why or scale_rule.violation(product, operand, rule.per)
                if why:
                    raise ValueError(f"{type(self).__name__}.{where}: its scale {why}. {scale_rule.advice(product, operand)}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the recipe as plain data, which `Recipe.from_dict` turns back into this recipe.

        >>> Recipe.from_dict(Recipe().to_dict()) == Recipe()
        True
        """
        return _to_data(self)

    def to_json(self) -> str:
        """Returns `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Recipe:
        """Creates a recipe from the data of `to_dict`."""
        recipe = _from_data(data)
        if not isinstance(recipe, Recipe):
            raise ValueError(f"Recipe.from_dict: expected the data of a Recipe, but got a {type(recipe).__name__}.")
        return recipe


def _to_data(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {f.name: _to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return {"type": type(value).__name__, **fields}


def _from_data(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    known = {cls.__name__: cls for base in (Recipe, TensorRule, ClipRule, LearningRateRule) for cls in _family(base)}
    name = data.get("type", "")
    if name not in known:
        raise ValueError(
            f"Recipe.from_dict: unknown type {name!r}; known are {', '.join(sorted(known))}. "
            "Import the module that defines it first."
        )
    left_out = ("type", *getattr(known[name], "retired", ()))
    return known[name](**{key: _from_data(value) for key, value in data.items() if key not in left_out})


def _family(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for child in base.__subclasses__():
        yield from _family(child)


def recipe_classes() -> dict[str, type[Recipe]]:
    """Returns all recipe classes that have a slug, by slug."""
    return {cls.slug: cls for cls in _family(Recipe) if cls.slug}


def resolve(recipe: Recipe | str) -> Recipe:
    """Returns the recipe with this slug. Returns a `Recipe` unchanged.

    >>> resolve("plain-int8").slug
    'plain-int8'
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe: got a {type(recipe).__name__}; pass a Recipe, such as byteback.UnifiedInt8(), or a slug, such as "
            "'unified-int8'."
        )
    classes = recipe_classes()
    if recipe not in classes:
        raise unknown("recipe", "name", recipe, sorted(classes))
    return classes[recipe]()
