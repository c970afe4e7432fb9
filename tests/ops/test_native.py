# SPDX-License-Identifier: Apache-2.0
"""Paths: the choice, its errors, and that no path goes untested by accident."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

import byteback
from byteback import ops
from byteback.ops import native

ONE = torch.ones(1, 1, 1, 1)


def product() -> torch.Tensor:
    x = torch.arange(-24, 24, dtype=torch.int8).reshape(1, 3, 4, 4)
    return ops.conv_int8(x, ONE, torch.ones(2, 3, 1, 1, dtype=torch.int8), ONE, [1, 1], [0, 0], [1, 1])


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="the native library is built on x86-64 Linux only"
)
def test_this_machine_runs_the_native_paths_that_it_can() -> None:
    assert native.library is not None, "the native library did not load, so its kernels go untested"
    with open("/proc/cpuinfo") as info:
        has_avx2 = " avx2 " in info.read()
    assert ("avx2" in native.available()) == has_avx2
    assert "generic" in native.available()


@pytest.mark.parametrize("path", native.available())
def test_the_chosen_path_serves(path: str) -> None:
    with byteback.path(path):
        result = product()
    assert native.last_kernel.split("/")[0] == ("" if path == "reference" else path)
    with byteback.path("reference"):
        assert torch.equal(result, product())


def test_paths_nest_and_the_environment_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "reference")
    assert native.current() == "reference"
    with byteback.path(native.available()[0]):
        assert native.current() == native.available()[0]
        with byteback.path("reference"):
            assert native.current() == "reference"
        assert native.current() == native.available()[0]


def test_an_unknown_path_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'sse' is unknown; there are reference, generic, avx2"), byteback.path("sse"):
        pass


def test_a_path_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", None)
    why = r"(?s)no kernel can run.*avx2 +: this build has no native library"
    with pytest.raises(RuntimeError, match=why), byteback.path("avx2"):
        pass
