# SPDX-License-Identifier: Apache-2.0
"""The statistics: maxima, ordered sums, tails and the terms of cosines."""

from __future__ import annotations

import numpy as np
import torch

from byteback import ops
from fuzz.fields import Case, Choice, Number
from fuzz.harness import Check, Kind
from fuzz.kind_quantize import SHAPE, bias_shape, shape_of
from fuzz.operands import FLOATS, INTEGERS, LAYOUTS, VECTOR_LAYOUTS, floats, integers, laid_out, magnitudes
from oracles import quantize, statistics

CLIPS = Choice(("ordinary", "ones", "wild", "mixed"))


def _build(case: Case, rng: np.random.Generator) -> Check:
    x = laid_out(floats(shape_of(case), case["x"], rng), case["layout"])
    array, name = x.numpy(), case["name"]
    if name == "absmax":
        axis = {"all": -1, "n": 0, "c": 1, "nc": -1, "last": x.dim() - 1}[case["per"]]
        return Check(lambda: ops.absmax(x, axis), quantize.absmax(array, axis), [x])
    if name == "moments":
        return Check(lambda: ops.moments(x), statistics.moments(array), [x])
    if name == "channel_stats":
        return Check(lambda: ops.channel_stats(x), statistics.channel_stats(array), [x])
    if name == "cosine_slope_terms":
        clip = magnitudes([], case["clip"], rng)
        return Check(lambda: ops.cosine_slope_terms(x, clip), statistics.cosine_slope_terms(array, clip.numpy()), [x, clip])
    stochastic = case["stochastic"]
    if name == "channel_cosine_terms":
        each = magnitudes([case["clips"], x.shape[1]], case["clip"], rng)
        expected = statistics.channel_cosine_terms(array, each.numpy(), stochastic)
        return Check(lambda: ops.channel_cosine_terms(x, each, stochastic), expected, [x, each])
    clips = laid_out(magnitudes([case["clips"]], case["clip"], rng), case["clip_layout"])
    expected = statistics.cosine_terms(array, clips.numpy(), stochastic)
    return Check(lambda: ops.cosine_terms(x, clips, stochastic), expected, [x, clips])


def _build_tails(case: Case, rng: np.random.Generator) -> Check:
    x = laid_out(floats(shape_of(case), case["x"], rng), case["layout"])
    count = x.shape[1] if case["per"] == "c" or case["pair"] else 1
    vector = laid_out(magnitudes([count], case["clip"], rng), case["clip_layout"])
    column = statistics.column(vector.numpy(), x.dim())
    if not case["pair"]:
        threshold = vector.as_strided(column.shape, [vector.stride(0) if size > 1 else 1 for size in column.shape])
        return Check(lambda: ops.tail_count(x, threshold), statistics.tail_count(x.numpy(), column), [x, vector])
    one = magnitudes([], case["clip"], rng)
    expected = statistics.tail_count(x.numpy(), column), statistics.tail_count(x.numpy(), one.numpy())
    return Check(lambda: ops.tail_count_pair(x, vector, one), expected, [x, vector, one])


def _build_dots(case: Case, rng: np.random.Generator) -> Check:
    shape = shape_of(case)
    x = laid_out(floats(shape, case["x"], rng), case["layout"])
    values = laid_out(integers(shape, case["q"], rng), case["q_layout"])
    axes = {"all": [], "n": [0], "c": [1], "nc": [0, 1], "last": [x.dim() - 1]}[case["per"]]
    scale = magnitudes([size if dim in axes else 1 for dim, size in enumerate(shape)], case["scale"], rng)
    scale = scale if case["scale_layout"] == "expanded" else laid_out(scale, case["scale_layout"])
    expected = statistics.dot_terms(x.numpy(), values.numpy(), scale.numpy())
    return Check(lambda: ops.dot_terms(x, values, scale), expected, [x, values, scale])


def _build_sums(case: Case, rng: np.random.Generator) -> Check:
    if case["last"]:
        values = floats((3, case["channels"]), case["x"], rng).to(torch.float64)
        return Check(lambda: ops.sum_last(values), statistics.tree(values.numpy().T), [values])
    each = floats((1, case["channels"], 1, 1), case["x"], rng).to(torch.float64)
    expected = np.asarray(statistics.tree(each.numpy().reshape(-1))).reshape(1, 1, 1, 1)
    return Check(lambda: ops.sum_channels(each), expected, [each])


_COMMON = {**SHAPE, "x": FLOATS, "layout": LAYOUTS}
_PER = Choice(("all", "n", "c", "nc", "last"))
KINDS = [
    Kind(
        "statistics",
        6,
        {
            **_COMMON,
            "name": Choice(
                ("absmax", "moments", "channel_stats", "cosine_terms", "channel_cosine_terms", "cosine_slope_terms")
            ),
            "stochastic": Choice((False, True)),
            "per": _PER,
            "clip": CLIPS,
            "clips": Number(1, 20, (1, 8, 9)),
            "clip_layout": VECTOR_LAYOUTS,
        },
        _build,
        bias_shape,
    ),
    Kind(
        "tails",
        2,
        {**_COMMON, "per": Choice(("all", "c")), "pair": Choice((False, True)), "clip": CLIPS, "clip_layout": VECTOR_LAYOUTS},
        _build_tails,
        bias_shape,
    ),
    Kind(
        "dot_terms",
        2,
        {
            **_COMMON,
            "q": INTEGERS,
            "q_layout": LAYOUTS,
            "per": _PER,
            "scale": Choice(("ordinary", "ones", "wild")),
            "scale_layout": VECTOR_LAYOUTS,
        },
        _build_dots,
        bias_shape,
    ),
    Kind("sum_channels", 1, {"channels": Number(1, 200), "x": FLOATS, "last": Choice((False, True))}, _build_sums),
]
