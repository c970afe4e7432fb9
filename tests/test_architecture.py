# SPDX-License-Identifier: Apache-2.0
"""The house has floors, and dependencies point down only.

    cli → report_page → train, bench → convert, lr_scaling, inspect, export → nn → recipes → quantize → ops

`tables`, `suggestions`, `models`, `torchvision_compat` and `detection_ops` are leaves: every floor above ops may use
them, they use none (models may use suggestions and torchvision_compat, that detection_ops, and that ops). Inside the rooms
above nn no two files import each other in a circle. Every import statement of src/byteback is read with ast; an offence is
named as file:line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import byteback

PACKAGE = Path(byteback.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}

FLOORS = {
    "ops": 0,
    "quantize": 1,
    "recipes": 2,
    "nn": 3,
    **dict.fromkeys(("convert", "lr_scaling", "inspect", "export"), 4),
    "loading": 4,  # byteback.load, which finds the trainer by its name when it is called
    "__init__": 5,  # the public names show floors 0 to 4; the trainer and the command line are users of them
    **dict.fromkeys(("train", "bench"), 6),
    "report_page": 7,
    "cli": 8,
    "__main__": 9,
}
LEAVES: dict[str, set[str]] = {
    "tables": set(),
    "suggestions": set(),
    "detection_ops": {"ops"},
    "torchvision_compat": {"detection_ops"},
    "models": {"suggestions", "torchvision_compat"},
}
# Rooms of floor 4 may use each other downwards in this order only, or two of them could need each other.
FOURTH_FLOOR = ["convert", "lr_scaling", "inspect", "export"]
WITHOUT_CIRCLES = ["convert", "inspect", "train", "bench", "report_page", "models"]
CORE_MAY_IMPORT = {"byteback", "torch", "numpy", *sys.stdlib_module_names}
# Optional, so only inside the function that needs it.
LAZY = {
    **{"tables": {"rich"}, "torchvision_compat": {"torchvision"}, "models": {"torchvision"}},
    "export": {"onnx", "onnx_ir", "onnxruntime"},
}
KERNELS = "ops/backends/triton/kernels"  # imported when the first tensor of a GPU arrives, and Triton with them
LONGEST_FILE = 400
MAY_BE_LONGER = 0.1  # of all files: "most files", and one kernel may deserve more


class Import(NamedTuple):
    module: str  # absolute, as far as the statement says
    line: int
    top_level: bool


def room(file: Path) -> str:
    """The first part of a file's name inside the package: 'ops' for ops/block.py, 'cli' for cli.py."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(source: str, package: str = "byteback") -> Iterator[Import]:
    """Every import of a file, also those inside functions and under TYPE_CHECKING."""
    tree = ast.parse(source)
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        top = id(node) not in lazy
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, top)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            if base == "byteback":  # `from byteback import ops` names rooms (or public names, checked as rooms too)
                for alias in node.names:
                    yield Import(f"byteback.{alias.name}", node.lineno, top)
            else:
                yield Import(base, node.lineno, top)


def offence(here: str, there: str) -> str | None:
    """Why `here` may not import `byteback.there`; None where it may."""
    if there not in FLOORS and there not in LEAVES:
        there = "__init__"  # a public name, such as byteback.prepare
    if here == there:
        return None
    if there in LEAVES:
        if here in LEAVES and there not in LEAVES[here]:
            return f"the leaf {here} may not use {there}"
        return None
    if here in LEAVES:
        return None if there in LEAVES[here] else f"{here} is a leaf and uses no floor, but imports {there}"
    if there == "__init__" and FLOORS[here] < FLOORS["__init__"]:
        return f"{here} imports the public package, which is made of it; import from the room that defines the name"
    if FLOORS[there] > FLOORS[here]:
        return f"{here} (floor {FLOORS[here]}) knows {there} (floor {FLOORS[there]}), which is above it"
    if here in FOURTH_FLOOR and there in FOURTH_FLOOR and FOURTH_FLOOR.index(there) > FOURTH_FLOOR.index(here):
        return f"{here} knows {there}, which comes after it on floor 4 ({' → '.join(reversed(FOURTH_FLOOR))})"
    return None


def found_in(file: Path) -> Iterator[Import]:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return imports(file.read_text(encoding="utf-8"), ".".join(parts[:-1]))


def where(file: Path, line: int) -> str:
    return f"{file.relative_to(PACKAGE.parents[1])}:{line}"


def test_there_are_files_to_look_at() -> None:
    assert {"ops", "quantize", "recipes", "nn", "convert", "lr_scaling", "inspect"} <= {room(file) for file in FILES}


def test_every_room_has_a_floor() -> None:
    unknown = {room(file) for file in FILES} - FLOORS.keys() - LEAVES.keys()
    assert not unknown, f"give {', '.join(sorted(unknown))} a floor in tests/test_architecture.py"


def test_dependencies_point_down() -> None:
    offences = []
    for file in FILES:
        for item in found_in(file):
            package, *rooms = item.module.split(".")
            why = offence(room(file), rooms[0] if rooms else "__init__") if package == "byteback" else None
            if why:
                offences.append(f"{where(file, item.line)}: {why}")
    assert not offences, "\n" + "\n".join(offences)


def test_only_the_cpu_backend_loads_the_native_library() -> None:
    loads = [str(file.relative_to(PACKAGE)) for file in FILES if '"byteback._native"' in file.read_text(encoding="utf-8")]
    imports_it = [str(file.relative_to(PACKAGE)) for file in FILES for item in found_in(file) if "_native" in item.module]
    assert loads == ["ops/backends/cpu/library.py"] and not imports_it


def needs(file: Path) -> set[str]:
    """The files that a file imports, by their module's name; of a package its __init__.py."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from byteback.train import loop` needs the file loop.py
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that need each other, the first again at the end; empty if there are none."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        found = next((found for other in sorted(graph.get(name, ())) if (found := walk(other, [*way, name]))), [])
        done.add(name)
        return found

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


@pytest.mark.parametrize("name", WITHOUT_CIRCLES)
def test_no_two_files_of_a_room_need_each_other(name: str) -> None:
    own = {module: file for module, file in MODULES.items() if f"{module}.".startswith(f"byteback.{name}.")}
    assert own, f"there is no room {name}"
    assert not (found := circle({module: needs(file) & own.keys() for module, file in own.items()})), " → ".join(found)


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_core_floors_import_torch_numpy_and_the_standard_library_only() -> None:
    offences = []
    for file in FILES:
        if FLOORS.get(room(file), 0) >= FLOORS["train"]:
            continue  # the trainer and the command line bring what pyproject's `train` extra names
        for item in found_in(file):
            package = item.module.split(".")[0]
            lazily_fine = package in LAZY.get(room(file), set()) and not item.top_level
            lazily_fine |= package == "triton" and KERNELS in file.as_posix()
            if package not in CORE_MAY_IMPORT and not lazily_fine:
                offences.append(f"{where(file, item.line)}: imports {item.module}")
    assert not offences, "\n" + "\n".join(offences)


def test_no_room_is_called_utils() -> None:
    nameless = [str(file) for file in FILES if file.stem in ("utils", "util", "common", "helpers", "helper", "misc")]
    assert not nameless, f"name the room after what it is for: {nameless}"


def test_most_files_are_short() -> None:
    long = {
        str(file.relative_to(PACKAGE)): lines
        for file in FILES
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) >= LONGEST_FILE
    }
    assert len(long) <= MAY_BE_LONGER * len(FILES), f"{len(long)} of {len(FILES)} files are long: {long}"


def test_every_file_opens_with_its_licence_and_says_what_it_is_for() -> None:
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), file
        assert ast.get_docstring(ast.parse(text)), f"{file} has no header"


# ---- the walker itself: a guard that catches nothing would pass every test above ----


@pytest.mark.parametrize(
    ("here", "there", "allowed"),
    [
        ("nn", "ops", True),
        ("nn", "recipes", True),
        ("inspect", "convert", True),
        ("lr_scaling", "convert", True),
        ("cli", "train", True),
        ("quantize", "tables", True),
        ("models", "torchvision_compat", True),
        ("ops", "quantize", False),
        ("quantize", "recipes", False),
        ("recipes", "nn", False),
        ("nn", "convert", False),
        ("convert", "inspect", False),
        ("convert", "lr_scaling", False),
        ("inspect", "train", False),
        ("export", "train", False),
        ("train", "cli", False),
        ("report_page", "train", True),
        ("train", "report_page", False),
        ("tables", "ops", False),
        ("models", "nn", False),
        ("detection_ops", "ops", True),
        ("detection_ops", "nn", False),
        ("torchvision_compat", "models", False),
        ("__init__", "inspect", True),
        ("__init__", "models", True),
        ("train", "__init__", True),
        ("train", "UnifiedInt8", True),
        ("__init__", "train", False),
        ("inspect", "UnifiedInt8", False),
        ("nn", "__init__", False),
    ],
)
def test_the_rule_knows_up_from_down(here: str, there: str, allowed: bool) -> None:
    assert (offence(here, there) is None) == allowed


def test_the_walker_sees_every_kind_of_import() -> None:
    source = "\n".join(
        [
            "import byteback.train.loop",
            "from byteback import ops, tables",
            "from byteback.nn import layer",
            "from . import sibling",
            "from ..convert import prepare",
            "if TYPE_CHECKING:",
            "    import rich.table",
            "def late():",
            "    from torchvision import models",
        ]
    )
    assert sorted(imports(source, "byteback.ops"), key=lambda item: item.line) == [
        ("byteback.train.loop", 1, True),
        ("byteback.ops", 2, True),
        ("byteback.tables", 2, True),
        ("byteback.nn", 3, True),
        ("byteback.ops", 4, True),
        ("byteback.convert", 5, True),
        ("rich.table", 7, True),
        ("torchvision", 9, False),
    ]
