# SPDX-License-Identifier: Apache-2.0
"""Recipe: what was asked for. Frozen data that says how each tensor is quantized and which products run in int8.

    input, weight ──► output         grad_output ──► grad_input         grad_output_for_weight (or grad_output) ──► grad_weight

A recipe of your own is a subclass with other defaults, or an instance with other fields; `docs/3-clipping.md` shows one.
The scale rule is checked when a recipe is built, so an impossible one never reaches a layer.
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


@dataclass(frozen=True)
class LearningRateRule:
    """Base of rules that turn a layer's direction deviation into a factor on its learning rate."""

    def factor(self, deviation: float) -> float:
        """The factor for a layer whose gradient deviates by `deviation` = 1 - cosine."""
        raise NotImplementedError(f"{type(self).__name__}.factor: a learning-rate rule must say how it scales")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network trains in int8.

    input, weight, grad_output   how each operand becomes int8
    grad_output_for_weight       a second copy of grad_output for grad_weight only; None: one copy serves both products
    depthwise_shares             depthwise convolutions, which sum over no channel, use one copy of grad_output with a scale per
                                 channel for both backward products, where the clip rule can choose one
    learning_rate                a rule that scales each layer's learning rate; None: every factor is 1
    output, grad_input, grad_weight   whether that product runs in int8; False keeps it float, on unquantized operands
    strict                       int8 also where float is faster; False lets float serve what nn/float_table.py lists
    first_conv, linear           whether the first convolution and the Linear layers run in int8 too (the first paper: no)
    on_nonfinite                 NaN or Inf to be quantized: "raise", "skip" (the whole step) or "propagate"
    eval_clip                    eval quantizes inputs with the clip "tracked" in training, or with each "batch"'s own
    momentum                     of the tracked clip's exponential average
    norm_memory                  what a fused block keeps of its norm's input for backward: "float32", "bfloat16" or "int8"
    residual_memory              what a fused block adds: the residual as "float32", or its "int8" copy, values · scale
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

    def __post_init__(self) -> None:
        name = type(self).__name__
        for value, known, what in (
            (self.on_nonfinite, NONFINITE_POLICIES, "on_nonfinite"),
            (self.eval_clip, EVAL_CLIPS, "eval_clip"),
            (self.norm_memory, NORM_MEMORIES, "norm_memory"),
            (self.residual_memory, RESIDUAL_MEMORIES, "residual_memory"),
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
                f"{name}: momentum is {self.momentum} and observe_every {self.observe_every}; momentum must lie in (0, 1] and "
                "observe_every must be at least 1."
            )
        for role in ("input", "weight"):
            if getattr(self, role).rounding != "nearest":
                raise ValueError(
                    f"{name}: {role}.rounding is 'stochastic', but the forward pass uses no noise, so that a prediction is "
                    "always the same. Round it to nearest."
                )
            if getattr(self, role).clip.looks_back:
                raise ValueError(
                    f"{name}: {role}.clip is {type(getattr(self, role).clip).__name__}, which looks back at earlier "
                    "iterations; activation checkpointing may run a forward pass again, and it must then choose as before. "
                    "Use it for gradients only."
                )
        self._check_scale_rule()

    def grad_output_rule(self, depthwise: bool) -> TensorRule:
        """`grad_output` as a layer uses it: in a depthwise convolution per channel, if that is wanted and can be had.

        With a copy of its own for grad_weight that varies along K, that copy is the one that both products share.
        """
        rule = self.grad_output
        if not depthwise or not self.depthwise_shares or self.grad_output_for_weight is not None or not rule.clip.allows("K"):
            return rule
        return dataclasses.replace(rule, per="K")

    def operands(self, product: str) -> Iterator[tuple[str, str, TensorRule]]:
        """(field of the recipe, operand's name, its rule) for both operands of a product."""
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
        """Plain data that `Recipe.from_dict` turns back into this recipe.

        >>> Recipe.from_dict(Recipe().to_dict()) == Recipe()
        True
        """
        return _to_data(self)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Recipe:
        """The recipe that `to_dict` described."""
        recipe = _from_data(data)
        if not isinstance(recipe, Recipe):
            raise ValueError(f"Recipe.from_dict: the data describe a {type(recipe).__name__}, not a recipe.")
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
    """Every recipe that has a slug, by its slug."""
    return {cls.slug: cls for cls in _family(Recipe) if cls.slug}


def resolve(recipe: Recipe | str) -> Recipe:
    """A recipe from its slug, or the recipe itself.

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
