# SPDX-License-Identifier: Apache-2.0
"""The scale rule: a scale may vary only along an axis that is not summed over.

Terms with different scales cannot be added, so in each product of a convolution the scale of an operand may vary along one axis
only. The rule is defined only here. Recipes are checked when they are created, operators when they are called.

    product       shape          sums over      scales may vary along
    output        (N,K,OH,OW)    C, R, S        N of input,        K of weight
    grad_input    (N,C,H,W)      K, R, S        N of grad_output,  C of weight
    grad_weight   (K,C,R,S)      N, OH, OW      K of grad_output,  C of input

In a depthwise convolution (groups = C = K) grad_input sums over R and S only, so there K of grad_output is allowed as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

# product -> operand -> (axis of the operand along which its scale may vary, letter of the axis)
ALLOWED: dict[str, dict[str, tuple[int, str]]] = {
    "output": {"input": (0, "N"), "weight": (0, "K")},
    "grad_input": {"grad_output": (0, "N"), "weight": (1, "C")},
    "grad_weight": {"grad_output": (1, "K"), "input": (1, "C")},
}

# operand -> letter -> axis of the tensor
AXES: dict[str, dict[str, int]] = {
    "input": {"N": 0, "C": 1},
    "weight": {"K": 0, "C": 1},
    "grad_output": {"N": 0, "K": 1},
}

_SUMS_OVER = {"output": ("C", "R", "S"), "grad_input": ("K", "R", "S"), "grad_weight": ("N", "OH", "OW")}


def violation(product: str, operand: str, letter: str) -> str | None:
    """Returns why the scale of `operand` in `product` cannot vary along `letter`; None if it can.

    >>> violation("grad_weight", "grad_output", "K") is None
    True
    >>> violation("grad_input", "grad_output", "K")
    'varies along K; but grad_input sums over K, and terms with different scales cannot be added'
    """
    if ALLOWED[product][operand][1] == letter:
        return None
    summed = letter if letter in _SUMS_OVER[product] else ", ".join(_SUMS_OVER[product])
    return f"varies along {letter}; but {product} sums over {summed}, and terms with different scales cannot be added"


def advice(product: str, operand: str) -> str:
    """Returns the advice for the error message of a violation."""
    if (product, operand) == ("grad_input", "grad_output"):
        return "Quantize grad_output per tensor for this product; per channel is allowed in Recipe.grad_output_for_weight."
    return f"Quantize {operand} per tensor, or along {ALLOWED[product][operand][1]}."


def check_scale(op: str, product: str, operand: str, values: Tensor, scale: Tensor, depthwise: bool = False) -> None:
    """Raises an error unless `scale` is float32, has the rank of `values` and follows the rule for `product`."""
    if scale.dtype != torch.float32:
        raise TypeError(f"{op}: {operand}.scale has dtype {scale.dtype}, but must be float32. Call .float() on it.")
    if scale.dim() != values.dim():
        raise ValueError(
            f"{op}: {operand}.scale has shape {tuple(scale.shape)} but {operand} has shape {tuple(values.shape)}; a scale must "
            "have the rank of its tensor, with size 1 along the axes that share it, so that it broadcasts. Reshape the scale."
        )
    axis, _ = ALLOWED[product][operand]
    for dim, (have, want) in enumerate(zip(scale.shape, values.shape, strict=True)):
        if have == 1:
            continue
        letters = {index: letter for letter, index in AXES[operand].items()}
        if dim != axis and not (depthwise and product == "grad_input" and AXES[operand].get("K") == dim):
            why = violation(product, operand, letters[dim]) if dim in letters else None
            why = why or f"varies along axis {dim}; but {product} sums over it, and terms with different scales cannot be added"
            raise ValueError(f"{op}: {operand}.scale has shape {tuple(scale.shape)}, so it {why}. {advice(product, operand)}")
        if have != want:
            raise ValueError(
                f"{op}: {operand}.scale has size {have} along {letters[dim]}, but {operand} has size {want}; "
                "it must have one scale for all or one for each. Quantize the tensor again."
            )


def combine_scales(product: str, first: Tensor, second: Tensor, groups: int, channels: int) -> Tensor:
    """Returns the factor that converts the integers of the product to floats, in a shape that broadcasts over the result.

    `first` is the scale of input (for output) or grad_output (for the gradients), `second` is that of the other operand.
    `channels` is K. If `first` varies along K in grad_input, the convolution is depthwise, and K is C.
    """
    rank = first.dim()
    ones = (1,) * (rank - 2)
    if product == "output":
        return first * second.reshape(1, -1, *ones)
    if product == "grad_input":
        per_c = second.reshape(1, -1, *ones)
        return first * (per_c.repeat(1, groups, *ones) if per_c.numel() > 1 else per_c)
    per_k = first.reshape(-1, 1, *ones)
    if second.numel() == 1 or groups == 1:
        return per_k * second
    # The rows of group j of the weight use input channels from j*C/groups on, so each row gets the scales of its group.
    per_group = second.reshape(groups, -1).repeat_interleave(channels // groups, dim=0)
    return per_k * per_group.reshape(channels, -1, *ones)
