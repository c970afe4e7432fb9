# SPDX-License-Identifier: Apache-2.0
"""The layout that csrc/README.md promises: small folders, and intrinsics in the folders of an instruction set only."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp"))
MOST = 15  # files of a folder
INTRINSIC = re.compile(r"\b_mm\d*_|\b__m\d+\w?\b|immintrin\.h|arm_neon\.h")
SETS = ("x86", "neon")  # folders of instruction sets


def test_there_are_files_to_look_at() -> None:
    assert len(FILES) > 80


def test_no_folder_is_crowded() -> None:
    crowded = {str(folder): count for folder, count in Counter(path.parent for path in FILES).items() if count > MOST}
    assert not crowded, f"give a family of files its own folder: {crowded}"


def test_file_names_are_unique() -> None:
    """So a comment may name a file without its folder."""
    repeated = [name for name, count in Counter(path.name for path in FILES).items() if count > 1]
    assert not repeated


def test_a_driver_knows_no_instruction_set() -> None:
    offences = [
        f"{path.relative_to(CSRC)}:{number}: {line.strip()}"
        for path in FILES
        if path.parent.name not in SETS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if INTRINSIC.search(line.partition("//")[0])
    ]
    assert not offences, "use the names of core/x86/vector_avx2.h instead:\n" + "\n".join(offences)


def test_only_files_of_an_instruction_set_include_its_headers() -> None:
    offences = [
        str(path.relative_to(CSRC))
        for path in FILES
        if path.parent.name not in SETS and re.search(r'#include "[^"]*/(x86|neon)/', path.read_text(encoding="utf-8"))
    ]
    assert not offences, offences


def test_includes_are_relative_to_csrc() -> None:
    for path in FILES:
        for name in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8")):
            assert (CSRC / name).is_file(), f"{path.relative_to(CSRC)} includes {name}"


def test_lines_are_within_the_limit() -> None:
    """clang-format leaves comments alone."""
    offences = [
        f"{path.relative_to(CSRC)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 128
    ]
    assert not offences, offences
