# SPDX-License-Identifier: Apache-2.0
"""Which backend runs an operator: by device and path, once for each call; and every backend has every function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from byteback.ops.backends import meta, paths, reference
from byteback.ops.backends.cpu import backend as cpu
from byteback.ops.backends.registry import backend_for

X = torch.ones(2, 3)
NATIVE = [path for path in paths.available() if path != "reference"]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", reference.__all__)
def test_every_backend_has_every_function_with_the_same_parameters(name: str) -> None:
    expected = parameters(getattr(reference, name))
    assert parameters(getattr(meta, name)) == expected
    assert parameters(cpu.FUNCTIONS[name]) == ["path", *expected]


def test_a_device_and_a_path_choose_the_backend() -> None:
    assert backend_for("op", X.to("meta")) is meta
    with paths.path("reference"):
        assert backend_for("op", X, None, X) is reference
        assert backend_for("op", X.to("meta")) is meta


@pytest.mark.parametrize("path", NATIVE)
def test_a_native_path_runs_dense_tensors_of_the_cpu(path: str) -> None:
    negative = torch.complex(X, X).conj().imag
    with paths.path(path):
        assert backend_for("op", X, None, X).path == paths.number()
        assert backend_for("op", X[:0]) is reference
        assert backend_for("op", negative) is reference and backend_for("op", X, negative) is reference


def test_tensors_on_two_devices_are_refused() -> None:
    for tensors in ((X, X.to("meta")), (X.to("meta"), X), (X, None, X.to("meta"))):
        with pytest.raises(ValueError, match=r"op: a tensor of shape \(2, 3\) is on (cpu|meta), but one of"):
            backend_for("op", *tensors)
