# SPDX-License-Identifier: Apache-2.0
"""One block against an oracle in float64, forward and back: every norm, activation and memory, with and without a residual.

The oracle starts from the integers that the convolution was given, and each step is compared with what went into it, so that
nothing is lost in the noise of quantization:

    y       the product, the norm's state and the output          up to float32 rounding
    y kept  step / 2 from y (int8), 2^-8 · |y| (bfloat16)
    g       the gradient of y at the kept y, as floats            up to float32 rounding (where grad_input stays float)
    g_q     its int8 copies                                       less than one step from it, clipped
    grads   of x and weight: the products of those integers       up to float32 rounding
            of gamma, beta, bias and residual                     up to float32 rounding

With float32 memory the gradient is that of torch.autograd in float64, and the formula used for the other forms is compared
with it. Rounding: each float32 operation is off by at most 2^-24 of its result, and no result takes more than 20 of them, so
2^-19 of the sum of the absolute terms is enough. A kink of an activation closer than that to some z would make the
derivative uncertain; the drawn numbers have none, which is asserted.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import grad as conv_grad

import byteback
from byteback import ops
from byteback.nn.autograd import ConvProducts
from byteback.nn.fused.sources import Floats, attach_source
from byteback.ops.backends import paths

ROUNDING = 2.0**-19
ACTIVATIONS: dict[str, Any] = {
    "none": lambda z: z,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
}
KINKS = {"none": (), "relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0), "silu": (), "gelu": ()}
STEEPEST = 1.5  # of all derivatives, that of hardswish at 3
SMOOTH = ("hardswish", "silu", "gelu")
FORMS = [("batch", "float32"), ("batch", "bfloat16"), ("batch", "int8"), ("given", "float32"), ("none", "float32")]
RECIPES: dict[str, Any] = {
    "plain": byteback.PlainInt8,
    "unified": byteback.UnifiedInt8,
    "distribution-adaptive": byteback.DistributionAdaptiveInt8,
    "plain, grad_input in float": partial(byteback.PlainInt8, grad_input=False),
    "plain, residual in int8": partial(byteback.PlainInt8, residual_memory="int8"),
}
CASES = [*((recipe, paths.available()[0]) for recipe in RECIPES), ("plain, grad_input in float", "reference")]


class OneBlock(nn.Module):
    """act(norm(conv(x)) + residual)."""

    def __init__(self, norm: str, activation: str, adds: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8) if norm != "none" else None
        self.activation, self.adds = activation, adds
        if self.norm is not None:
            with torch.no_grad():
                self.norm.weight.copy_(torch.linspace(-3.0, 4.0, 8))
                self.norm.bias.copy_(torch.linspace(2.0, -1.0, 8))
                self.norm.running_mean.uniform_(-0.2, 0.2), self.norm.running_var.uniform_(0.1, 0.4)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self.conv(x)
        y = y if self.norm is None else self.norm(y)
        y = y + residual if self.adds else y
        return ACTIVATIONS[self.activation](y)


class Int8Operand(NamedTuple):
    values: Tensor
    scale: Tensor

    def exact(self) -> Tensor:
        return self.values.double() * self.scale.double()


def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The int8 operands of the last product of each kind; "float": the gradient that a float product was given."""
    seen: dict[str, Any] = {}
    for name in ("conv_int8", "conv_normalize_batch", "conv_int8_grad_input", "conv_int8_grad_weight"):
        original = getattr(ops, name)

        def record(
            a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *rest: Any, name: str = name, run: Any = original, **o: Any
        ) -> Any:
            kind = "output" if name in ("conv_int8", "conv_normalize_batch") else name
            seen[kind] = Int8Operand(a.clone(), sa.clone()), Int8Operand(b.clone(), sb.clone())
            return run(a, sa, b, sb, *rest, **o)

        monkeypatch.setattr(ops, name, record)
    float_product = ConvProducts.float_grad_input

    def record_floats(self: ConvProducts, g: Tensor, *rest: Any) -> Tensor:
        seen["float"] = g.clone()
        return float_product(self, g, *rest)

    monkeypatch.setattr(ConvProducts, "float_grad_input", record_floats)
    return seen


def column(vector: Tensor) -> Tensor:
    return vector.reshape(1, -1, 1, 1)


def total(x: Tensor) -> Tensor:
    return x.sum((0, 2, 3))


def near(actual: Tensor, expected: Tensor, size: Tensor | float, what: str) -> None:
    """Up to float32 rounding of terms that add up to `size` in magnitude."""
    worst = ((actual.double() - expected).abs() - ROUNDING * (expected.abs() + size)).max().item()
    assert worst <= 0.0, f"{what}: off by {worst} more than rounding explains"


class Oracle:
    """The block in float64, from the operands of its convolution."""

    def __init__(self, model: OneBlock, x: Int8Operand, weight: Int8Operand, residual: Tensor) -> None:
        self.model, self.batch = model, model.norm is not None and model.norm.training
        self.y = F.conv2d(x.exact(), weight.exact(), padding=1)
        bias, norm = model.conv.bias.detach().double(), model.norm
        if norm is None:
            self.mean, self.invstd = torch.zeros(8).double(), torch.ones(8).double()
            self.gamma, self.beta = torch.ones(8).double(), bias
        else:
            self.gamma, self.beta = norm.weight.detach().double(), norm.bias.detach().double()
            given = norm.running_mean.double() - bias, norm.running_var.double()
            self.mean, var = (self.y.mean((0, 2, 3)), self.y.var((0, 2, 3), unbiased=False)) if self.batch else given
            self.invstd = 1.0 / torch.sqrt(var + norm.eps)
        self.a = self.gamma * self.invstd
        self.b = self.beta - self.mean * self.a
        self.residual = residual.double() if model.adds else torch.zeros(1).double()
        self.z = column(self.a) * self.y + column(self.b) + self.residual
        self.z_size = (
            column(self.a.abs()) * self.y.abs() + column(self.b.abs() + (self.a * self.mean).abs()) + self.residual.abs()
        )

    def slope(self, z: Tensor) -> Tensor:
        for kink in KINKS[self.model.activation]:
            assert bool(((z - kink).abs() > ROUNDING * (z.abs() + self.z_size)).all()), "draw other numbers"
        z = z.clone().requires_grad_()
        return torch.autograd.grad(ACTIVATIONS[self.model.activation](z).sum(), z)[0]

    def gradients(self, g: Tensor, kept: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """{name: (value, size)} of the gradients, where backward sees `kept` in place of y."""
        g, m, hat = g.double(), float(g.numel() // 8), column(self.invstd) * (kept - column(self.mean))
        # A smooth activation inside the block takes z again from what was kept; a residual or a mask leaves it what it was.
        again = self.model.activation in SMOOTH and not self.model.adds
        slope = self.slope(column(self.a) * kept + column(self.b) if again else self.z)
        passed, passed_size = g * slope, g.abs() * (slope.abs() + 1.0 + self.z_size)
        beta, beta_size = total(passed), total(passed_size)
        gamma, gamma_size = total(passed * hat), total(passed_size * (hat.abs() + column((self.mean * self.invstd).abs())))
        y_grad, y_size = column(self.a) * passed, column(self.a.abs()) * passed_size
        if self.batch:
            y_grad = y_grad - column(self.a) * (column(beta) + hat * column(gamma)) / m
            far = column(self.invstd) * (kept.abs() + column(self.mean.abs()))
            y_size = y_size + column(self.a.abs()) * (column(beta_size) + far * column(gamma_size)) / m
        found = {"y": (y_grad, y_size), "residual": (passed, passed_size)}
        if self.model.norm is None:
            return {**found, "bias": (beta, beta_size)}
        bias = (torch.zeros(8).double(), torch.zeros(8)) if self.batch else (self.a * beta, self.a.abs() * beta_size)
        return {**found, "gamma": (gamma, gamma_size), "beta": (beta, beta_size), "bias": bias}

    def by_autograd(self, g: Tensor) -> dict[str, Tensor]:
        """The same with y itself, by torch.autograd."""
        y, residual = self.y.clone().requires_grad_(), self.residual.clone().requires_grad_()
        gamma, beta = self.gamma.clone().requires_grad_(), self.beta.clone().requires_grad_()
        mean, invstd = self.mean, self.invstd
        if self.batch:
            eps = self.model.norm.eps  # type: ignore[union-attr]
            mean, invstd = y.mean((0, 2, 3)), 1.0 / torch.sqrt(y.var((0, 2, 3), unbiased=False) + eps)
        z = column(gamma) * column(invstd) * (y - column(mean)) + column(beta) + residual
        ACTIVATIONS[self.model.activation](z).backward(g.double())
        return {"y": y.grad, "residual": residual.grad, "gamma": gamma.grad, "beta": beta.grad}  # type: ignore[dict-item]


def kept_by(node: Any, oracle: Oracle, memory: str) -> Tensor:
    """What backward will see in place of y, after a look at how far it is from y."""
    saved = node.saved_tensors[11:]
    if memory == "int8":
        values, step, centre = saved
        reach = (oracle.y - column(oracle.mean)).abs().amax((0, 2, 3))
        near(step, reach / 127.0, oracle.mean.abs(), "step")
        near(centre, oracle.mean, oracle.y.abs().amax((0, 2, 3)), "centre")
        kept = values.double() * column(step).double() + column(centre).double()
        allowed = column(step).double() / 2.0
    elif saved:
        kept, allowed = saved[0].double(), oracle.y.abs() * (2.0**-8 if memory == "bfloat16" else 0.0)
    else:
        return oracle.y
    assert bool(((kept - oracle.y).abs() <= allowed + ROUNDING * (oracle.y.abs() + column(oracle.mean.abs()))).all())
    return kept


def block_of(output: Tensor) -> Any:
    """The node of the block in the graph behind its output."""
    node = output.grad_fn
    while type(node).__name__ != "FusedBlockBackward":
        (node,) = [before for before, _ in node.next_functions if "Accumulate" not in type(before).__name__]  # type: ignore
    return node


def check_step(model: OneBlock, x: Tensor, residual: Tensor, g: Tensor, memory: str, seen: dict[str, Any]) -> None:
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    added = residual.detach()
    if model.conv.recipe.residual_memory == "int8":  # type: ignore[union-attr]
        source = Floats(added)
        attach_source(residual, source)
        added, scale = source.int8()[1].dequantize(), source.int8()[1].scale
        assert bool(((added - residual).abs() <= scale * (0.5 + ROUNDING)).all())
    model.zero_grad()
    if model.norm is not None:
        before = model.norm.running_mean.clone()
    output = model(x, residual)
    x_q, w_q = seen["output"]
    oracle = Oracle(model, x_q, w_q, added)
    if not oracle.batch and model.norm is not None:
        assert torch.equal(before, model.norm.running_mean)
    near(output.detach(), ACTIVATIONS[model.activation](oracle.z), STEEPEST * oracle.z_size + 1.0, "output")
    node = block_of(output)
    for name, value, size in (
        ("a", oracle.a, 0.0),
        ("mean", oracle.mean, oracle.y.abs().amax()),
        ("invstd", oracle.invstd, 0.0),
    ):
        near(dict(zip(("a", "b", "mean", "invstd"), node.saved_tensors[7:11], strict=True))[name], value, size, name)
    kept = kept_by(node, oracle, memory)
    expected = oracle.gradients(g, kept)
    if memory == "float32":
        exact = oracle.gradients(g, oracle.y)
        for name, value in oracle.by_autograd(g).items():
            if name in exact and (name != "residual" or model.adds):
                torch.testing.assert_close(exact[name][0], value, rtol=1e-9, atol=1e-9, msg=name)
    output.backward(g)
    actual = {"bias": model.conv.bias.grad}
    actual |= {} if model.norm is None else {"gamma": model.norm.weight.grad, "beta": model.norm.bias.grad}
    actual |= {"residual": residual.grad} if model.adds else {}
    for name, grad in actual.items():
        near(grad, *expected[name], name)
    assert not oracle.batch or not model.conv.bias.grad.any()  # exactly
    check_products(x, model.conv.weight, expected["y"], seen)


def check_products(x: Tensor, weight: Tensor, y_grad: tuple[Tensor, Tensor], seen: dict[str, Any]) -> None:
    """The int8 copies of y's gradient (or the gradient itself, where a product runs in float), and the two products of them."""
    g_q, x_q = seen["conv_int8_grad_weight"]
    copies = [g_q]
    if "float" in seen:
        near(seen["float"], *y_grad, "gradient of y")
        g, w = seen["float"].double(), weight.detach().double()
    else:
        copies.append(seen["conv_int8_grad_input"][0])
        g, w = (operand.exact() for operand in seen["conv_int8_grad_input"])
        assert torch.equal(seen["conv_int8_grad_input"][1].values, seen["output"][1].values)
    assert torch.equal(x_q.values, seen["output"][0].values)
    for copy in copies:
        check_copy(copy, *y_grad)
    for actual, product, operands in (
        (x.grad, lambda g, w: conv_grad.conv2d_input(x.shape, w, g, padding=1), (g, w)),
        (weight.grad, lambda g, x: conv_grad.conv2d_weight(x, weight.shape, g, padding=1), (g_q.exact(), x_q.exact())),
    ):
        size = product(*(operand.abs() for operand in operands))
        near(actual, product(*operands), size if actual is x.grad and "float" in seen else 2.0**-20 * size, "product")


def check_copy(copy: Int8Operand, value: Tensor, size: Tensor) -> None:
    """Stochastic rounding moves each element by less than a step, after it was clipped."""
    scale = copy.scale.double()
    clipped = torch.minimum(torch.maximum(value, -127.0 * scale), 127.0 * scale)
    off = (copy.exact() - clipped).abs() - scale - ROUNDING * size
    assert float(off.max()) <= 0.0, f"a gradient's integer is {float((off / scale).max())} steps too far"
    assert int(copy.values.abs().max()) > 60, "a gradient of zeros proves nothing"


@pytest.mark.parametrize(("recipe", "path"), CASES)
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "adds"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("norm", "memory"), FORMS)
def test_a_block_computes_what_it_stands_for(
    norm: str, memory: str, activation: str, adds: bool, recipe: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (norm, activation, adds) == ("none", "none", False) or (not adds and recipe == "plain, residual in int8"):
        return  # a convolution alone is no block, and nothing is added
    model = OneBlock(norm, activation, adds)
    byteback.prepare(model, RECIPES[recipe](first_conv=True, norm_memory=memory))
    if norm == "given":
        model.norm.eval()  # type: ignore[union-attr]
    seen = recorded(monkeypatch)
    draw = torch.Generator().manual_seed(5)
    with byteback.path(path):
        for _ in range(2):  # the first step searches for clips, the second holds them
            x, residual, g = (torch.randn(4, c, 7, 5, generator=draw) for c in (6, 8, 8))
            check_step(model, x, residual, g, memory, seen)
