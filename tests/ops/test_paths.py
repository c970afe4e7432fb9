# SPDX-License-Identifier: Apache-2.0
"""Paths: the choice, its errors, and that no path goes untested by accident."""

from __future__ import annotations

import platform
import sys
import types

import pytest
import torch

import byteback
from byteback import ops
from byteback.ops.backends import paths
from byteback.ops.backends.cpu import library as native_library

ONE = torch.ones(1, 1, 1, 1)


def product() -> torch.Tensor:
    x = torch.arange(-24, 24, dtype=torch.int8).reshape(1, 3, 4, 4)
    return ops.conv_int8(x, ONE, torch.ones(2, 3, 1, 1, dtype=torch.int8), ONE, [1, 1], [0, 0], [1, 1])


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="the native library is built on x86-64 Linux only"
)
def test_this_machine_runs_the_native_paths_that_it_can() -> None:
    assert native_library.native is not None, "the native library did not load, so its kernels go untested"
    with open("/proc/cpuinfo") as info:
        flags = set(info.read().split())
    assert ("avx2" in paths.available()) == ("avx2" in flags)
    vnni = {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    assert ("avx512vnni" in paths.available()) == (vnni <= flags)
    assert "generic" in paths.available()


@pytest.mark.parametrize("path", paths.available())
def test_the_chosen_path_serves(path: str) -> None:
    with byteback.path(path):
        result = product()
    assert paths.last_kernel().split("/")[0] == ("" if path == "reference" else path)
    with byteback.path("reference"):
        assert torch.equal(result, product())


def test_paths_nest_and_the_environment_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.VARIABLE, "reference")
    monkeypatch.setattr(paths, "_default", paths._default.__wrapped__)
    assert paths.current() == "reference"
    with byteback.path(paths.available()[0]):
        assert paths.current() == paths.available()[0]
        with byteback.path("reference"):
            assert paths.current() == "reference"
        assert paths.current() == paths.available()[0]


def test_an_unknown_path_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"unknown path 'sse'; choose one of reference, generic, avx2"), byteback.path("sse"):
        pass


def test_a_path_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "native", None)
    why = r"(?s)no kernel can run.*avx2 +: this build has no native library"
    with pytest.raises(RuntimeError, match=why), byteback.path("avx2"):
        pass


def test_a_path_that_fails_its_self_check_is_refused_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.SimpleNamespace(
        is_compiled=lambda path: True,
        cpu_supports=lambda path: True,
        self_check=lambda path: "output by avx512vnni/gemm_s8 differs from the generic path",
    )
    monkeypatch.setattr(native_library, "native", broken)
    native_library.self_check.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="'avx512vnni' is not used, because its self-check failed"):
            assert paths.available()[0] == "avx2"
        assert "self-check failed here: output by" in paths.why_not("avx512vnni")
        with pytest.raises(RuntimeError, match="self-check failed"), byteback.path("avx512vnni"):
            pass
    finally:
        native_library.self_check.cache_clear()


@pytest.mark.skipif("avx512vnni" not in paths.available(), reason="needs AVX-512 VNNI")
def test_a_self_check_compares_every_native_path() -> None:
    assert native_library.native is not None
    assert [native_library.native.self_check(number) for number in range(3)] == ["", "", ""]


@pytest.mark.skipif("avx512vnni" not in paths.available(), reason="needs AVX-512 VNNI")
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_that_wrap_on_the_way_come_out_right(sign: int) -> None:
    """With the offset of 128 the sums pass 2^31 (255 * 127 * depth), the result (127 * 127 * depth) does not."""
    depth = 17 << 12  # a float32 holds the result
    x = torch.full((1, depth, 1, 1), 127, dtype=torch.int8)
    w = torch.full((1, depth, 1, 1), 127 * sign, dtype=torch.int8)
    with byteback.path("avx512vnni"):
        result = ops.conv_int8(x, ONE, w, ONE, [1, 1], [0, 0], [1, 1])
    assert paths.last_kernel() == "avx512vnni/gemm_s8"
    assert result.item() == sign * 127 * 127 * depth


@pytest.mark.skipif("avx512vnni" not in paths.available(), reason="needs AVX-512 VNNI")
@pytest.mark.parametrize("value", [127, -127])
def test_sums_beyond_int32_stay_on_the_path(value: int) -> None:
    x, w = (torch.full((1, 140000, 1, 1), v, dtype=torch.int8) for v in (value, 127))
    with byteback.path("avx512vnni"):
        result = ops.conv_int8(x, ONE, w, ONE, [1, 1], [0, 0], [1, 1])
    assert paths.last_kernel() == "avx512vnni/gemm_s8"
    assert result.item() == torch.tensor(value * 127 * 140000, dtype=torch.float64).float().item()
