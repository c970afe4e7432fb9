# SPDX-License-Identifier: Apache-2.0
"""Recipe: what can be asked for, what is refused when it is built, and that it survives JSON.

The errors are checked for their four parts: where, what, why, what to do.
"""

import dataclasses
import json

import pytest
import torch

from byteback import (
    Choice,
    ClipRule,
    DeviationCounteractive,
    DirectionSensitive,
    DistributionAdaptiveInt8,
    Int8Conv2d,
    LearningRateRule,
    MagnitudeAware,
    MaxAbs,
    PlainInt8,
    Recipe,
    TensorRule,
    UnifiedInt8,
)
from byteback.recipes import recipe_classes, resolve

RECIPES = [PlainInt8(), UnifiedInt8(), DistributionAdaptiveInt8()]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.slug)


# ---- frozen data -----------------------------------------------------------------------------------------------------


@recipes
def test_recipe_is_frozen(recipe):
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.momentum = 0.5


@recipes
def test_equal_recipes_are_equal_and_hash_alike(recipe):
    again = type(recipe)()
    assert again == recipe and hash(again) == hash(recipe) and again is not recipe
    assert dataclasses.replace(recipe, momentum=0.5) != recipe


def test_defaults_are_the_papers():
    unified, adaptive, plain = UnifiedInt8(), DistributionAdaptiveInt8(), PlainInt8()
    for recipe in (unified, adaptive, plain):
        assert recipe.input == recipe.weight == TensorRule(MaxAbs(), "nearest", "tensor")
        assert recipe.grad_output.rounding == "stochastic" and recipe.grad_output.per == "tensor"
        assert (recipe.output, recipe.grad_input, recipe.grad_weight) == (True, True, True)
        assert (recipe.first_conv, recipe.linear) == (False, False)
        assert (recipe.on_nonfinite, recipe.eval_clip, recipe.momentum) == ("raise", "tracked", 0.1)
    assert unified.grad_output.clip == DirectionSensitive(
        period=10,
        hold="ratio",
        band=1.5,
        solver="grid",
        evaluations=12,
        lowest=0.05,
        tie=1e-6,
        search_when_saturated=0.01,
    )
    assert unified.learning_rate == DeviationCounteractive(alpha=20.0, beta=0.1)
    assert unified.grad_output_for_weight is None and plain.grad_output_for_weight is None
    assert adaptive.grad_output_for_weight == TensorRule(MagnitudeAware(0.3, 1.0, 0.8), "stochastic", "K")
    assert adaptive.learning_rate is None and plain.learning_rate is None


# ---- JSON ------------------------------------------------------------------------------------------------------------


@recipes
def test_to_json_and_back_gives_the_same_recipe(recipe):
    data = json.loads(recipe.to_json())
    again = Recipe.from_dict(data)
    assert type(again) is type(recipe) and again == recipe


def test_round_trip_keeps_fields_that_are_not_defaults():
    recipe = UnifiedInt8(
        grad_output=TensorRule(DirectionSensitive(period=3, tie=None, hold="ratio"), "nearest"),
        learning_rate=DeviationCounteractive(alpha=3.0),
        on_nonfinite="skip",
        grad_weight=False,
    )
    again = Recipe.from_dict(json.loads(recipe.to_json()))
    assert again == recipe and again != UnifiedInt8()
    assert again.grad_output.clip.period == 3 and again.grad_output.clip.tie is None


def test_from_dict_names_an_unknown_type_and_what_to_do():
    data = PlainInt8().to_dict()
    data["input"]["clip"]["type"] = "Nowhere"
    with pytest.raises(ValueError, match=r"Recipe\.from_dict: unknown type 'Nowhere'.*MaxAbs.*Import the module"):
        Recipe.from_dict(data)


def test_from_dict_refuses_what_is_not_a_recipe():
    with pytest.raises(ValueError, match="expected the data of a Recipe, but got a TensorRule"):
        Recipe.from_dict({"type": "TensorRule"})


# ---- the scale rule, when a recipe is built --------------------------------------------------------------------------


def test_grad_output_per_channel_cannot_serve_grad_input():
    with pytest.raises(ValueError) as error:
        Recipe(grad_output=TensorRule(rounding="stochastic", per="K"))
    message = str(error.value)
    assert message.startswith("Recipe.grad_output:")  # where
    assert "grad_input sums over K" in message  # which product
    assert "terms with different scales cannot be added" in message  # why
    assert "Recipe.grad_output_for_weight" in message  # what to do


@pytest.mark.parametrize(
    ("fields", "where", "product"),
    [
        ({"input": TensorRule(per="C")}, "input", "output sums over C"),
        ({"input": TensorRule(per="N")}, "input", "grad_weight sums over N"),
        ({"weight": TensorRule(per="K")}, "weight", "grad_input sums over K"),
        ({"weight": TensorRule(per="C")}, "weight", "output sums over C"),
        ({"grad_output": TensorRule(per="N")}, "grad_output", "grad_weight sums over N"),
        ({"grad_output_for_weight": TensorRule(per="N")}, "grad_output_for_weight", "grad_weight sums over N"),
    ],
    ids=["input-C", "input-N", "weight-K", "weight-C", "grad_output-N", "grad_output_for_weight-N"],
)
def test_scale_that_does_not_survive_the_sum_is_refused(fields, where, product):
    with pytest.raises(ValueError, match=f"^UnifiedInt8.{where}: .*{product}.*Quantize"):
        UnifiedInt8(**fields)


@pytest.mark.parametrize(
    ("fields", "where", "axis"),
    [
        ({"input": TensorRule(per="K")}, "input", "K"),
        ({"weight": TensorRule(per="N")}, "weight", "N"),
        ({"grad_output": TensorRule(per="C")}, "grad_output", "C"),
    ],
    ids=["input-K", "weight-N", "grad_output-C"],
)
def test_axis_that_the_operand_lacks_is_refused(fields, where, axis):
    with pytest.raises(ValueError, match=f"^Recipe.{where}: its scale varies along {axis}, but {where} has no such axis"):
        Recipe(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"grad_output_for_weight": TensorRule(per="K")},
        {"grad_output": TensorRule(per="K"), "grad_input": False},
        {"grad_output": TensorRule(per="N"), "grad_weight": False},
        {"grad_output": TensorRule(per="N"), "grad_output_for_weight": TensorRule(per="K")},
        {"weight": TensorRule(per="K"), "grad_input": False},
        {"weight": TensorRule(per="C"), "output": False},
        {"input": TensorRule(per="N"), "grad_weight": False},
        {"input": TensorRule(per="C"), "output": False},
    ],
    ids=lambda fields: "-".join(f"{key}_{getattr(value, 'per', 'float')}" for key, value in fields.items()),
)
def test_recipe_that_obeys_the_scale_rule_trains_a_layer(fields):
    """Every granularity that can be built also runs, in training and in eval."""
    layer = Int8Conv2d(4, 6, 3, groups=2, recipe=Recipe(**fields))
    x = torch.randn(3, 4, 6, 6, requires_grad=True)
    float_output = torch.nn.functional.conv2d(x, layer.weight, layer.bias, groups=2)
    for training in (True, False):
        layer.train(training)
        x.grad = layer.weight.grad = None
        output = layer(x)
        output.square().sum().backward()
        assert (output - float_output).abs().max() < 0.1 * float_output.abs().max()
        assert x.grad.abs().max() > 0 and layer.weight.grad.abs().max() > 0


# ---- bad fields ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'ignore'; choose one of raise, skip, propagate"),
        ({"eval_clip": "best"}, "eval_clip is 'best'; choose one of tracked, batch"),
        ({"momentum": 0.0}, "momentum is 0.0"),
        ({"momentum": 1.5}, "momentum is 1.5"),
        ({"observe_every": 0}, ".*observe_every 0"),
        ({"input": TensorRule(rounding="stochastic")}, "input.rounding is 'stochastic'.*Use rounding='nearest'"),
        ({"weight": TensorRule(rounding="stochastic")}, "weight.rounding is 'stochastic'.*Use rounding='nearest'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_field_is_refused_with_its_value(fields, words):
    with pytest.raises(ValueError, match=f"^PlainInt8: {words}"):
        PlainInt8(**fields)


# ---- resolve ---------------------------------------------------------------------------------------------------------


def test_every_slug_resolves_to_its_class():
    assert {"plain-int8", "unified-int8", "distribution-adaptive-int8"} <= recipe_classes().keys()
    for recipe in RECIPES:
        assert resolve(recipe.slug) == recipe
        assert resolve(recipe) is recipe


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("unified", "unified-int8"),
        ("Plain_int8", "plain-int8"),
        ("distribution-adaptive", "distribution-adaptive-int8"),
    ],
)
def test_unknown_slug_suggests_the_near_one(typed, meant):
    with pytest.raises(ValueError, match=f"unknown name {typed!r}. Did you mean {meant}.*plain-int8"):
        resolve(typed)


def test_unknown_slug_far_from_all_others_lists_them_without_a_guess():
    with pytest.raises(ValueError, match="unknown name 'zzzz'") as error:
        resolve("zzzz")
    assert "Did you mean" not in str(error.value)


def test_a_class_instead_of_an_instance_is_a_type_error():
    with pytest.raises(TypeError, match=r"got a type; pass a Recipe, such as byteback.UnifiedInt8\(\)"):
        resolve(UnifiedInt8)


# ---- a recipe of one's own -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HalfOfMax(ClipRule):
    """A user's rule: half the maximum, so that something saturates."""

    share: float = 0.5

    def choose(self, x, axis, memory):
        return Choice(x.abs().amax().reshape((1,) * x.dim()) * self.share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyInt8(Recipe):
    slug = ""
    grad_output: TensorRule = dataclasses.field(default_factory=lambda: TensorRule(HalfOfMax(), "stochastic"))


def test_user_written_recipe_and_clip_rule_work_end_to_end():
    layer = Int8Conv2d(2, 3, 3, recipe=MyInt8())
    x = torch.randn(2, 2, 6, 6, requires_grad=True)
    output = layer(x)
    grad = torch.zeros_like(output)
    grad[0, 0, 0, 0], grad[1, 1, 2, 2] = 4.0, 1.0
    output.backward(grad)
    # The clip is 2: the 4 saturates at 2, the 1 stays within a rounding step (2/127) of itself.
    exact = torch.nn.grad.conv2d_weight(x, layer.weight.shape, grad.clamp(-2.0, 2.0)).detach()
    assert torch.allclose(layer.weight.grad, exact, atol=0.1)
    assert not torch.allclose(layer.weight.grad, torch.nn.grad.conv2d_weight(x, layer.weight.shape, grad), atol=0.5)
    assert layer.quantizers.grad_output.observed[0, 0].item() == pytest.approx(1 / grad.numel())


def test_user_written_recipe_survives_json():
    recipe = MyInt8(grad_output=TensorRule(HalfOfMax(0.25)))
    assert Recipe.from_dict(json.loads(recipe.to_json())) == recipe


def test_clip_rule_without_choose_says_so():
    layer = Int8Conv2d(1, 1, 1, recipe=Recipe(grad_output=TensorRule(ClipRule())))
    with pytest.raises(NotImplementedError, match=r"ClipRule\.choose: a clip rule must implement choose"):
        layer(torch.ones(1, 1, 2, 2)).sum().backward()


def test_learning_rate_rule_without_factor_says_so():
    with pytest.raises(NotImplementedError, match=r"LearningRateRule\.factor: a learning-rate rule must implement factor"):
        LearningRateRule().factor(0.1)


def test_learning_rate_rule_works_with_a_clip_rule_that_remembers_nothing():
    """The deviation is measured for every clip rule, so its factor must reach the optimizer for every clip rule."""
    recipe = MyInt8(learning_rate=DeviationCounteractive(alpha=1e3))
    layer = Int8Conv2d(2, 3, 3, recipe=recipe)
    layer(torch.randn(2, 2, 6, 6)).square().sum().backward()
    assert layer.learning_rate_factor() < 1.0


class Loose(ClipRule):
    """A rule whose author forgot the dataclass decorator: its field takes no part in == and hash."""

    def __init__(self, bound):
        object.__setattr__(self, "bound", bound)

    def choose(self, x, axis, memory):
        return Choice(torch.full((1,) * x.dim(), self.bound))


def test_rules_that_are_no_dataclass_are_refused_or_kept_apart():
    """Such rules compare equal, and equal settings share a registry entry: a layer must not get another's rule."""
    try:
        recipes = [Recipe(grad_output=TensorRule(Loose(bound))) for bound in (1.0, 3.0)]
    except TypeError:
        return  # refused when built: fine
    scales = []
    for recipe in recipes:
        layer = Int8Conv2d(1, 1, 1, recipe=recipe, bias=False)
        output = layer(torch.ones(1, 1, 1, 2))
        output.backward(torch.tensor([[[[0.5, 5.0]]]]))
        scales.append(layer.weight.grad.item())
    # g = (0.5, 5) is clipped at 1 and at 3: sums about 1.5 and 3.5.
    assert scales[0] == pytest.approx(1.5, abs=0.02) and scales[1] == pytest.approx(3.5, abs=0.05)
