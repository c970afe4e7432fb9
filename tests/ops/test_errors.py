# SPDX-License-Identifier: Apache-2.0
"""Proves the checks at the door: every wrong argument is refused with the operator's name and both values in the message.

An error that only says "shape mismatch" costs its reader an hour; these strings are part of the interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from byteback import ops

ONE = torch.ones(1, 1, 1, 1)
Call = Callable[[], Any]


def i8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int8)


X, W, G = i8(2, 4, 8, 8), i8(64, 4, 3, 3), i8(2, 64, 6, 6)
XS, WS, GS = [2, 4, 8, 8], [64, 4, 3, 3], [2, 64, 6, 6]


def conv(**changes: Any) -> Any:
    """conv_int8 with sound arguments but for the changes."""
    given = {"x": X, "xs": ONE, "w": W, "ws": ONE, "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    return ops.conv_int8(*(given | changes).values())


def grad_input(**changes: Any) -> Any:
    given = {"g": G, "gs": ONE, "w": W, "ws": ONE, "size": XS}
    given |= {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    return ops.conv_int8_grad_input(*(given | changes).values())


def grad_weight(**changes: Any) -> Any:
    given = {"g": G, "gs": ONE, "x": X, "xs": ONE, "size": WS}
    given |= {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    return ops.conv_int8_grad_weight(*(given | changes).values())


def scale(*shape: int) -> Tensor:
    return torch.ones(shape)


def refused(error: type[Exception], call: Call, *words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert message.startswith(words[0] + ": "), "the message opens with the operator's name"


def test_the_sound_arguments_of_this_file_pass() -> None:
    assert conv().shape == (2, 64, 6, 6) and grad_input().shape == (2, 4, 8, 8) and grad_weight().shape == (64, 4, 3, 3)


def test_the_architectures_example_message() -> None:
    refused(
        ValueError,
        lambda: grad_input(gs=scale(1, 64, 1, 1)),
        "conv_int8_grad_input",
        "grad_output.scale has shape (1, 64, 1, 1), so it varies along K; but ",
        "sums over K, and terms with different scales cannot be added",
        "Quantize grad_output per tensor for this product; per channel is allowed in Recipe.grad_output_for_weight.",
    )


PRODUCTS = {"conv_int8": conv, "conv_int8_grad_input": grad_input, "conv_int8_grad_weight": grad_weight}
OPERANDS = {
    "conv_int8": {"x": "input", "w": "weight"},
    "conv_int8_grad_input": {"g": "grad_output", "w": "weight"},
    "conv_int8_grad_weight": {"g": "grad_output", "x": "input"},
}
EACH_OPERAND = pytest.mark.parametrize(
    ("op", "argument"), [(op, argument) for op, arguments in OPERANDS.items() for argument in arguments]
)
EACH_PRODUCT = pytest.mark.parametrize("op", list(PRODUCTS))


@EACH_OPERAND
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int32], ids=str)
def test_operands_that_are_not_int8_are_refused(op: str, argument: str, dtype: torch.dtype) -> None:
    sound = {"x": X, "w": W, "g": G}[argument]
    call = lambda: PRODUCTS[op](**{argument: sound.to(dtype)})  # noqa: E731
    refused(TypeError, call, op, f"{OPERANDS[op][argument]} has dtype {dtype}", "int8")


@EACH_OPERAND
def test_scales_that_are_not_float32_are_refused(op: str, argument: str) -> None:
    call = lambda: PRODUCTS[op](**{argument + "s": ONE.double()})  # noqa: E731
    refused(TypeError, call, op, f"{OPERANDS[op][argument]}.scale has dtype torch.float64", "float32")


@EACH_OPERAND
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1, 1)], ids=str)
def test_scales_of_another_rank_are_refused(op: str, argument: str, shape: tuple[int, ...]) -> None:
    tensor = {"x": X, "w": W, "g": G}[argument]
    words = (f"{OPERANDS[op][argument]}.scale has shape {shape}", f"has shape {tuple(tensor.shape)}", "rank")
    refused(ValueError, lambda: PRODUCTS[op](**{argument + "s": torch.ones(shape)}), op, *words)


# op, argument, shape of its scale, letter along which it varies (or the axis), what the product sums over
VIOLATIONS = [
    ("conv_int8", "x", (1, 4, 1, 1), "C"),
    ("conv_int8", "w", (1, 4, 1, 1), "C"),
    ("conv_int8_grad_input", "g", (1, 64, 1, 1), "K"),
    ("conv_int8_grad_input", "w", (64, 1, 1, 1), "K"),
    ("conv_int8_grad_weight", "g", (2, 1, 1, 1), "N"),
    ("conv_int8_grad_weight", "x", (2, 1, 1, 1), "N"),
    ("conv_int8_grad_weight", "x", (2, 4, 1, 1), "N"),
]


@pytest.mark.parametrize(("op", "argument", "shape", "letter"), VIOLATIONS)
def test_scales_that_vary_along_a_summed_axis_are_refused(op: str, argument: str, shape: tuple[int, ...], letter: str) -> None:
    name = OPERANDS[op][argument]
    words = (f"{name}.scale has shape {shape}", f"varies along {letter}", f"sums over {letter}", f"Quantize {name}")
    refused(ValueError, lambda: PRODUCTS[op](**{argument + "s": scale(*shape)}), op, *words)


@EACH_OPERAND
@pytest.mark.parametrize("axis", [2, 3])
def test_scales_that_vary_along_a_spatial_axis_are_refused(op: str, argument: str, axis: int) -> None:
    shape = [1, 1, 1, 1]
    shape[axis] = {"x": X, "w": W, "g": G}[argument].shape[axis]
    words = (f"{OPERANDS[op][argument]}.scale has shape {tuple(shape)}", f"axis {axis}")
    refused(ValueError, lambda: PRODUCTS[op](**{argument + "s": scale(*shape)}), op, *words)


@pytest.mark.parametrize(
    ("op", "argument", "shape", "have", "want"),
    [
        ("conv_int8", "x", (3, 1, 1, 1), "size 3 along N", "has size 2"),
        ("conv_int8", "w", (63, 1, 1, 1), "size 63 along K", "has size 64"),
        ("conv_int8_grad_input", "g", (4, 1, 1, 1), "size 4 along N", "has size 2"),
        ("conv_int8_grad_input", "w", (1, 5, 1, 1), "size 5 along C", "has size 4"),
        ("conv_int8_grad_weight", "g", (1, 32, 1, 1), "size 32 along K", "has size 64"),
        ("conv_int8_grad_weight", "x", (1, 8, 1, 1), "size 8 along C", "has size 4"),
    ],
)
def test_scales_of_the_wrong_length_are_refused(op: str, argument: str, shape: tuple[int, ...], have: str, want: str) -> None:
    refused(ValueError, lambda: PRODUCTS[op](**{argument + "s": scale(*shape)}), op, have, want)


@EACH_PRODUCT
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [[], [1], [1, 1, 1], [-1, 1], [1, -2]], ids=str)
def test_geometry_of_the_wrong_length_or_sign_is_refused(op: str, name: str, value: list[int]) -> None:
    refused(ValueError, lambda: PRODUCTS[op](**{name: value}), op, f"{name} is {value}", "must be 2 integers")


@EACH_PRODUCT
@pytest.mark.parametrize("name", ["stride", "dilation"])
def test_a_stride_or_dilation_of_zero_is_refused(op: str, name: str) -> None:
    refused(ValueError, lambda: PRODUCTS[op](**{name: [1, 0]}), op, f"{name} is [1, 0]", "at least 1")


@EACH_PRODUCT
@pytest.mark.parametrize("groups", [-1, 0, 2, 3, 5])
def test_groups_that_do_not_fit_the_channels_are_refused(op: str, groups: int) -> None:
    words = ("input has 4 channels", "weight has shape (64, 4, 3, 3)", f"groups is {groups}")
    refused(ValueError, lambda: PRODUCTS[op](groups=groups), op, *words)


def test_groups_that_do_not_divide_the_filters_are_refused() -> None:
    words = ("input has 4 channels", "weight has shape (5, 2, 3, 3)", "groups is 2")
    refused(ValueError, lambda: conv(w=i8(5, 2, 3, 3), groups=2), "conv_int8", *words)


def test_channels_that_do_not_match_are_refused() -> None:
    shapes = ("input has 5 channels", "weight has shape (64, 4, 3, 3)")
    refused(ValueError, lambda: conv(x=i8(2, 5, 8, 8)), "conv_int8", *shapes)
    refused(ValueError, lambda: grad_input(size=[2, 5, 8, 8]), "conv_int8_grad_input", *shapes)
    refused(ValueError, lambda: grad_weight(x=i8(2, 5, 8, 8)), "conv_int8_grad_weight", *shapes)


def test_ranks_without_a_convolution_are_refused() -> None:
    two = ("input has shape (2, 4)", "weight (64, 4, 3, 3)")
    refused(ValueError, lambda: conv(x=i8(2, 4)), "conv_int8", *two)
    refused(ValueError, lambda: grad_input(size=[2, 4]), "conv_int8_grad_input", *two)
    refused(ValueError, lambda: grad_weight(x=i8(2, 4)), "conv_int8_grad_weight", *two)
    six = ("input has shape (2, 4, 8, 8, 8, 8)", "weight (64, 4, 3, 3)")
    refused(ValueError, lambda: conv(x=i8(2, 4, 8, 8, 8, 8)), "conv_int8", *six)
    mixed = ("input has shape (2, 4, 8, 8)", "weight (64, 4, 3)")
    refused(ValueError, lambda: conv(w=i8(64, 4, 3)), "conv_int8", *mixed)
    refused(ValueError, lambda: grad_weight(size=[64, 4, 3]), "conv_int8_grad_weight", *mixed)


def test_a_kernel_larger_than_the_padded_image_is_refused() -> None:
    reach = ("covers 9 pixels on spatial axis 1", "has only 8")
    refused(ValueError, lambda: conv(dilation=[1, 4]), "conv_int8", *reach)
    refused(ValueError, lambda: grad_input(dilation=[1, 4]), "conv_int8_grad_input", *reach)
    refused(ValueError, lambda: grad_weight(dilation=[1, 4]), "conv_int8_grad_weight", *reach)
    assert conv(dilation=[1, 4], padding=[0, 1]).shape == (2, 64, 6, 2)


def test_a_kernel_without_taps_is_refused() -> None:
    refused(ValueError, lambda: conv(w=i8(64, 4, 0, 3)), "conv_int8")


def test_a_weight_without_filters_is_refused_or_gives_an_empty_output() -> None:
    try:
        assert conv(w=i8(0, 4, 3, 3)).shape == (2, 0, 6, 6)
    except ValueError as error:
        assert str(error).startswith("conv_int8: ")


@pytest.mark.parametrize("shape", [(2, 64, 6, 7), (1, 64, 6, 6), (2, 63, 6, 6), (2, 64, 6), (2, 64, 36)], ids=str)
def test_a_grad_output_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    words = (f"grad_output has shape {shape}", "the shape of the convolution's output, (2, 64, 6, 6)")
    one = torch.ones((1,) * len(shape))
    refused(ValueError, lambda: grad_input(g=i8(*shape), gs=one), "conv_int8_grad_input", *words)
    refused(ValueError, lambda: grad_weight(g=i8(*shape), gs=one), "conv_int8_grad_weight", *words)


# ---- matmul ----------------------------------------------------------------------------------------------------------

A, B, S2 = i8(3, 5), i8(5, 4), torch.ones(1, 1)
MATMUL: dict[str, tuple[type[Exception], Call, tuple[str, ...]]] = {
    "float_a": (TypeError, lambda: ops.matmul_int8(A.float(), S2, B, S2), ("a has dtype torch.float32", "int8")),
    "float_b": (TypeError, lambda: ops.matmul_int8(A, S2, B.float(), S2), ("b has dtype torch.float32", "int8")),
    "depths_differ": (ValueError, lambda: ops.matmul_int8(A, S2, A, S2), ("a has shape (3, 5) and b (3, 5)",)),
    "a_vector": (ValueError, lambda: ops.matmul_int8(i8(5), S2, B, S2), ("a has shape (5,) and b (5, 4)",)),
    "a_batch": (ValueError, lambda: ops.matmul_int8(i8(2, 3, 5), S2, B, S2), ("(2, 3, 5)",)),
    "a_scale_along_depth": (
        ValueError,
        lambda: ops.matmul_int8(A, scale(1, 5), B, S2),
        ("a_scale has shape (1, 5)", "sums over K", "(3, 1)"),
    ),
    "b_scale_along_depth": (
        ValueError,
        lambda: ops.matmul_int8(A, S2, B, scale(5, 1)),
        ("b_scale has shape (5, 1)", "sums over K", "(1, 4)"),
    ),
    "scale_rank": (ValueError, lambda: ops.matmul_int8(A, scale(1), B, S2), ("a_scale has shape (1,)",)),
    "scale_dtype": (ValueError, lambda: ops.matmul_int8(A, S2, B, S2.double()), ("dtype torch.float64", "float32")),
}


@pytest.mark.parametrize("case", list(MATMUL))
def test_matmul_refuses(case: str) -> None:
    error, call, words = MATMUL[case]
    refused(error, call, "matmul_int8", *words)


# ---- quantize and statistics -----------------------------------------------------------------------------------------

F4, C4, KEY = torch.zeros(2, 3, 4, 5), torch.ones(1, 1, 1, 1), torch.tensor([1, 2])
Refusal = tuple[str, type[Exception], Call, tuple[str, ...]]
FLOATS: dict[str, Refusal] = {
    "x_of_double": ("quantize", TypeError, lambda: ops.quantize(F4.double(), C4), ("torch.float64", "float32")),
    "x_of_half": ("quantize", TypeError, lambda: ops.quantize(F4.half(), C4), ("torch.float16", "float32")),
    "x_of_int8": ("quantize", TypeError, lambda: ops.quantize(i8(2, 3), S2), ("torch.int8", "float32")),
    "a_vector": ("quantize", ValueError, lambda: ops.quantize(torch.zeros(3), torch.ones(1)), ("(3,)", "N and a C")),
    "a_clip_of_another_rank": (
        "quantize",
        ValueError,
        lambda: ops.quantize(F4, torch.ones(1)),
        ("clip has shape (1,)", "x has shape (2, 3, 4, 5)"),
    ),
    "a_clip_of_another_length": (
        "quantize",
        ValueError,
        lambda: ops.quantize(F4, torch.ones(1, 2, 1, 1)),
        ("clip has shape (1, 2, 1, 1)", "x has shape (2, 3, 4, 5)"),
    ),
    "a_clip_of_double": ("quantize", ValueError, lambda: ops.quantize(F4, C4.double()), ("torch.float64", "float32")),
    "a_key_of_three_words": (
        "quantize",
        ValueError,
        lambda: ops.quantize(F4, C4, torch.tensor([1, 2, 3])),
        ("key has shape (3,)", "int64"),
    ),
    "a_key_of_int32": ("quantize", ValueError, lambda: ops.quantize(F4, C4, KEY.int()), ("torch.int32", "int64")),
    "absmax_of_double": ("absmax", TypeError, lambda: ops.absmax(F4.double()), ("torch.float64", "float32")),
    "absmax_of_a_scalar": ("absmax", ValueError, lambda: ops.absmax(torch.tensor(1.0)), ("shape ()",)),
    "moments_of_double": ("moments", TypeError, lambda: ops.moments(F4.double()), ("torch.float64", "float32")),
    "moments_of_a_vector": ("moments", ValueError, lambda: ops.moments(torch.zeros(3)), ("(3,)",)),
}


@pytest.mark.parametrize("case", list(FLOATS))
def test_quantize_absmax_and_moments_refuse(case: str) -> None:
    op, error, call, words = FLOATS[case]
    refused(error, call, op, *words)


# What these would compute without a check is wrong in silence: a threshold of shape (W,) broadcasts along W, not C.
SILENT: dict[str, Refusal] = {
    "absmax_along_an_axis_that_is_not_there": ("absmax", ValueError, lambda: ops.absmax(F4, 4), ("axis", "4")),
    "absmax_along_a_negative_axis": ("absmax", ValueError, lambda: ops.absmax(F4, -2), ("axis", "-2")),
    "tail_count_of_double": ("tail_count", TypeError, lambda: ops.tail_count(F4.double(), C4), ("torch.float64",)),
    "tail_count_of_a_vector": (
        "tail_count",
        ValueError,
        lambda: ops.tail_count(torch.zeros(3), torch.ones(1)),
        ("(3,)",),
    ),
    "tail_count_with_a_threshold_along_w": (
        "tail_count",
        ValueError,
        lambda: ops.tail_count(F4, torch.ones(5)),
        ("(5,)", "(2, 3, 4, 5)"),
    ),
    "tail_count_with_a_threshold_per_sample": (
        "tail_count",
        ValueError,
        lambda: ops.tail_count(F4, torch.ones(2, 1, 1, 1)),
        ("(2, 1, 1, 1)", "(2, 3, 4, 5)"),
    ),
    "dot_terms_of_double": (
        "dot_terms",
        TypeError,
        lambda: ops.dot_terms(F4.double(), i8(2, 3, 4, 5), C4),
        ("torch.float64",),
    ),
    "dot_terms_with_float_values": (
        "dot_terms",
        TypeError,
        lambda: ops.dot_terms(F4, F4, C4),
        ("torch.float32", "int8"),
    ),
    "dot_terms_with_values_of_another_shape": (
        "dot_terms",
        ValueError,
        lambda: ops.dot_terms(F4, i8(1, 3, 1, 1), C4),
        ("(1, 3, 1, 1)", "(2, 3, 4, 5)"),
    ),
    "dot_terms_with_a_scale_of_another_rank": (
        "dot_terms",
        ValueError,
        lambda: ops.dot_terms(F4, i8(2, 3, 4, 5), torch.ones(5)),
        ("(5,)",),
    ),
    "cosine_terms_of_double": (
        "cosine_terms",
        TypeError,
        lambda: ops.cosine_terms(F4.double(), torch.ones(2)),
        ("torch.float64",),
    ),
    "cosine_terms_with_a_table_of_clips": (
        "cosine_terms",
        ValueError,
        lambda: ops.cosine_terms(F4, torch.ones(2, 3)),
        ("(2, 3)",),
    ),
    "channel_cosine_terms_with_clips_of_other_channels": (
        "channel_cosine_terms",
        ValueError,
        lambda: ops.channel_cosine_terms(F4, torch.ones(2, 4)),
        ("(2, 4)", "(2, 3, 4, 5)"),
    ),
    "cosine_slope_terms_of_double": (
        "cosine_slope_terms",
        TypeError,
        lambda: ops.cosine_slope_terms(F4.double(), torch.tensor(1.0)),
        ("torch.float64",),
    ),
    "cosine_slope_terms_with_several_clips": (
        "cosine_slope_terms",
        ValueError,
        lambda: ops.cosine_slope_terms(F4, torch.ones(3)),
        ("(3,)",),
    ),
    "noise_key_of_a_float_seed": (
        "noise_key",
        TypeError,
        lambda: ops.noise_key(torch.tensor(1.5), torch.tensor(0), torch.tensor(0)),
        ("torch.float32", "int64"),
    ),
}


@pytest.mark.parametrize("case", list(SILENT))
def test_arguments_that_would_be_wrong_in_silence_are_refused(case: str) -> None:
    op, error, call, words = SILENT[case]
    refused(error, call, op, *words)


def test_fake_tensors_meet_the_same_checks() -> None:
    mode = FakeTensorMode()
    g, w, one, wide, x = (mode.from_tensor(t) for t in (G, W, ONE, scale(1, 64, 1, 1), F4.double()))
    with mode:
        refused(ValueError, lambda: grad_input(g=g, w=w, gs=wide, ws=one), "conv_int8_grad_input", "sums over K")
        refused(TypeError, lambda: ops.quantize(x, one), "quantize", "torch.float64")
