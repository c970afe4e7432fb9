# SPDX-License-Identifier: Apache-2.0
"""`byteback doctor` says what kind of machine this is. tests/test_cli.py runs it as a user does."""

from __future__ import annotations

import pytest
from rich.console import Console

from byteback.inspect import doctor
from byteback.inspect.doctor import DoctorConfig, Facts

ZEN4 = ({"avx2", "avx512_vnni", "avx512_bf16"}, {"vpdpbusd ymm": 236.0, "vpdpbusd zmm": 236.0, "vfmadd231ps zmm": 59.0})
SAPPHIRE = ({*ZEN4[0], "amx_tile", "amx_int8", "amx_bf16"}, {**ZEN4[1], "vpdpbusd zmm": 472.0, "vfmadd231ps zmm": 118.0})


def said(flags: set[str], peaks: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(doctor.machine, "cpu", lambda: ("some CPU", frozenset(flags)))
    monkeypatch.setattr(doctor.machine, "peaks", lambda: peaks)
    console = Console(record=True, width=250)
    doctor.run(DoctorConfig(), console, Facts("0", "BYTEBACK_DATA", lambda folder: [("digits", "here")]))
    return console.export_text()


def test_a_machine_that_splits_512_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(*ZEN4, monkeypatch)
    assert "are split in two, 1.00 times" in text and "bfloat16 by avx512_bf16, no AMX" in text
    row = next(line for line in text.splitlines() if "vpdpbusd zmm" in line)
    assert "236" in row and "4.00x" in row


def test_a_machine_with_full_width_and_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(*SAPPHIRE, monkeypatch)
    assert "run at full width, 2.00 times" in text
    assert "bf16 autocast may well be faster than int8 here" in text


def test_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(set(), {}, monkeypatch)
    assert "unknown" in text and "on registers" not in text and "bfloat16" not in text
