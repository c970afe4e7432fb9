# SPDX-License-Identifier: Apache-2.0
"""No AVX code for machines without AVX: reads the symbol tables of the compiled files, as the linker does.

An inline function or a template (of std::vector too) is compiled into every file that uses it, as a *weak* symbol; the linker
keeps one copy for all. If that is the copy of a file compiled for AVX, portable code runs AVX instructions. So such files must
define nothing weak. What they define for others must lie in the namespace of their path.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PATHS = ("avx2", "avx512vnni")
SOURCES = {file.name for file in (ROOT / "csrc").rglob("*.cpp")}
# A file that was deleted may have left its object file behind.
BUILDS = "build/*/CMakeFiles/_native.dir/csrc"
OBJECTS = [f for f in sorted(ROOT.glob(f"{BUILDS}/**/*.o")) if f.name.removesuffix(".o") in SOURCES]
VECTOR = [file for file in OBJECTS if file.name.endswith(tuple(f"_{path}.cpp.o" for path in PATHS))]
PORTABLE = [file for file in OBJECTS if file not in VECTOR]

built = pytest.mark.skipif(not VECTOR, reason="no object files of AVX kernels in build/: `make setup` leaves them there")

_LOCAL, _GLOBAL = 0, 1  # how symbols bind, in ELF; all other ways let the linker choose between copies
_FUNCTION, _INDIRECT = 2, 10
_POINTER = "DW.ref.__gxx_personality_v0"  # the address of the C++ runtime's function, the same in every copy


class Symbol(NamedTuple):
    name: str
    binding: int
    kind: int
    is_defined: bool
    is_code: bool


def symbols(file: Path) -> list[Symbol]:
    """The symbols of a 64-bit little-endian ELF file, local ones left out."""
    data = file.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", f"{file.name} is not an ELF file of x86-64"
    table, size, count = *struct.unpack_from("<Q", data, 0x28), *struct.unpack_from("<HH", data, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    found = []
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != 2:  # the symbol table
            continue
        names = sections[link][4]
        for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", data[offset : offset + length]):
            if info >> 4 == _LOCAL:
                continue
            text = data[names + name : data.index(b"\0", names + name)].decode()
            is_code = info & 15 in (_FUNCTION, _INDIRECT) or (0 < section < count and bool(sections[section][2] & 4))
            found.append(Symbol(text, info >> 4, info & 15, section != 0, is_code))
    return found


def weak(file: Path) -> list[str]:
    """What a file defines and the linker may take from another file instead, or give to it."""
    return [s.name for s in symbols(file) if s.is_defined and s.binding != _GLOBAL and s.name != _POINTER]


@built
def test_every_file_of_a_path_that_was_compiled_is_read() -> None:
    for folder in ROOT.glob(BUILDS):
        read = {file.name.removesuffix(".o") for file in OBJECTS if folder in file.parents}
        for path in PATHS:
            if any(name.endswith(f"_{path}.cpp") for name in read):
                assert {name for name in SOURCES if name.endswith(f"_{path}.cpp")} <= read


@built
@pytest.mark.parametrize("file", VECTOR, ids=lambda file: file.name)
def test_a_vector_file_defines_nothing_weak(file: Path) -> None:
    assert not weak(file)


@built
@pytest.mark.parametrize("file", VECTOR, ids=lambda file: file.name)
def test_a_vector_file_defines_for_others_what_its_path_has_and_nothing_else(file: Path) -> None:
    path = next(path for path in PATHS if file.name.endswith(f"_{path}.cpp.o"))
    given = [s.name for s in symbols(file) if s.is_defined and s.binding == _GLOBAL]
    assert given and all(name.startswith(f"_ZN8byteback{len(path)}{path}") for name in given), given


@built
def test_portable_code_uses_nothing_of_vector_files_but_their_paths() -> None:
    defined = {s.name for file in VECTOR for s in symbols(file) if s.is_defined and s.is_code}
    used = {s.name for file in PORTABLE for s in symbols(file)}
    shared = defined & used
    assert shared and all("4avx2" in name or "10avx512vnni" in name for name in shared), shared


@built
@pytest.mark.parametrize("file", OBJECTS, ids=lambda file: file.name)
def test_no_vector_math_of_the_c_library(file: Path) -> None:
    """libmvec's functions are off by units in the last place: sqrt must be the instruction, or libm's, which is exact."""
    assert not [s.name for s in symbols(file) if s.name.startswith("_ZGV") and not s.name.startswith("_ZGVZ")]


WEAK = """
#include <vector>
inline long twice(long x) { return 2 * x; }
long use(long n) { std::vector<long> v(n, twice(n)); return v[0]; }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_reader_finds_weak_functions_and_no_weak_removes_them(tmp_path: Path) -> None:
    (tmp_path / "weak.cpp").write_text(WEAK)
    for flags in ([], ["-fno-weak"]):
        subprocess.run(["g++", "-O0", *flags, "-c", "weak.cpp", "-o", "weak.o"], cwd=tmp_path, check=True, timeout=60)
        found = weak(tmp_path / "weak.o")
        assert ("_Z5twicel" in found) == (not flags) and bool(found) == (not flags)
        assert [s.name for s in symbols(tmp_path / "weak.o") if s.is_defined and s.binding == _GLOBAL] == ["_Z3usel"]
