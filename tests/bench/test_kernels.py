# SPDX-License-Identifier: Apache-2.0
"""`byteback bench kernels`: shares of the peak are of the right instruction, and no larger than it allows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from byteback.bench import kernels, peaks
from byteback.bench.kernels import KernelsConfig
from byteback.ops.backends import paths

CONV = Path(__file__).parents[2] / "csrc" / "conv" / "conv.cpp"
MEASURED = {
    **{"vpmaddubsw ymm": 120.0, "vpmaddwd ymm": 100.0, "vfmadd231ps ymm": 60.0},
    **{"vpdpbusd ymm": 240.0, "vpdpbusd zmm": 400.0, "vpdpwssd zmm": 200.0, "vfmadd231ps zmm": 110.0},
}


def test_every_vector_kernel_has_an_instruction() -> None:
    named = set(re.findall(r'"((?:avx2|avx512vnni)/\w+)"', CONV.read_text()))
    assert named == set(peaks._INSTRUCTIONS)


@pytest.mark.parametrize("kernel", sorted(peaks._INSTRUCTIONS))
def test_a_kernel_that_only_multiplies_reaches_its_peak_and_no_more(kernel: str) -> None:
    # By hand: 400 of vpdpbusd (its better width), 200 of vpdpwssd and 100 of vpmaddwd, of which Winograd needs a quarter.
    at_peak = {
        **{"avx2/gemm_u8": 120.0, "avx2/gemm_s16": 100.0, "avx2/winograd": 400.0, "avx2/depthwise": 100.0},
        **{"avx512vnni/gemm_s8": 400.0, "avx512vnni/winograd": 800.0, "avx512vnni/depthwise": 200.0},
        "avx512vnni/direct": 400.0,
    }
    assert peaks.share(MEASURED, kernel, at_peak[kernel]) == 1.0


@pytest.mark.parametrize(("kernel", "measured"), [("generic/direct", MEASURED), ("reference", MEASURED), ("avx2/gemm_u8", {})])
def test_a_share_that_is_not_known_is_none(kernel: str, measured: dict[str, float]) -> None:
    assert peaks.share(measured, kernel, 10.0) is None


def test_the_peaks_are_measured_first_and_written_with_the_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.machine, "peaks", lambda threads: MEASURED)
    shapes, file = tmp_path / "shapes.csv", tmp_path / "kernels.json"
    shapes.write_text(
        "batch,in_channels,out_channels,height,width,kernel_h,kernel_w,padding_h,padding_w\n2,16,16,8,8,3,3,1,1\n"
    )
    console = Console(record=True, width=200)
    kernels.run(KernelsConfig((str(shapes),), json=file, rounds=1, malloc="default"), console)
    result = json.loads(file.read_text())
    assert result["peaks"] == MEASURED
    for layer in result["layers"]:
        assert layer["of_peak"] == peaks.share(MEASURED, layer["kernel"], layer["gmacs"])
        assert (layer["of_peak"] is not None) == (paths.current().startswith("avx"))
        shares = result["shares"]["3x3_s1"]
        assert shares[layer["product"]] == (None if layer["of_peak"] is None else round(layer["of_peak"], 3))
        assert layer["gmacs"] == pytest.approx(2 * 16 * 16 * 8 * 8 * 9 / layer["alone_ms"] / 1e6)
    said = console.export_text()
    assert "peaks in GMAC/s, from registers: vpmaddubsw ymm 120" in said
    assert said.index("from registers") < said.index("of peak")
