# SPDX-License-Identifier: Apache-2.0
"""No address without a check, no address of a temporary, no new tensor without a device: src/byteback is read with ast.

addresses.py is the only file that asks a tensor where it is in order to tell the native library
an address is taken of a tensor that has a name: `key.contiguous().data_ptr()` is free memory before a kernel reads it
torch.empty and its kind say on which device: the default is the CPU, or whatever a caller has set
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import byteback
from byteback.ops.backends.cpu import addresses

PACKAGE = Path(byteback.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# For these an address is a name: whether two tensors share their memory, or somebody else asks for it.
IDENTITY = {"inspect/memory.py", "nn/layers/weights.py", "nn/fused/sources.py"}
ADDRESSES = {"flat", "last", "dense", "part", "known"}
MANY = {"residual_numbers", "kept_numbers", "backward_of", "quantized_to", "place"}  # in ops/backends/cpu, of several tensors
TAKERS = {f"byteback.ops.backends.cpu.{name}" for name in ("addresses", "block", "block_grad", "quantize")}
FACTORIES = {
    *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "scalar_tensor", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "logspace", "range", "from_numpy", "frombuffer"),
}
FLOORS = ("ops", "quantize", "recipes", "nn", "detection_ops.py")


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def is_held(node: ast.expr) -> bool:
    """Whether the object of an expression lives on after it: it is a name, or belongs to one."""
    if isinstance(node, (ast.Name, ast.Constant)):
        return True
    if isinstance(node, ast.Attribute):
        return is_held(node.value)
    # An item of a tuple; a slice or a mask of a tensor may be a copy.
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and is_held(node.value)


def is_held_collection(node: ast.expr) -> bool:
    """Whether everything in it lives on."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(is_held_collection(item.value if isinstance(item, ast.Starred) else item) for item in node.elts)
    if isinstance(node, ast.BoolOp):
        return all(map(is_held_collection, node.values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("zip", "enumerate"):
        return all(map(is_held_collection, node.args))
    return is_held(node)


def taken(tree: ast.AST) -> Iterator[tuple[ast.Call, list[ast.expr]]]:
    """Every call that takes addresses, with the tensors that they are taken of."""
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in TAKERS
        for alias in node.names
    }
    if imported:  # the files of ops/backends/cpu themselves
        imported |= {node.name: node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
        through_module = isinstance(function, ast.Attribute) and is_named(function.value, "addresses", "kernels")
        if isinstance(function, ast.Attribute) and name == "data_ptr":
            yield node, [function.value]
        elif through_module or name in imported:
            name = imported.get(name, name)
            if name in ADDRESSES:
                yield node, node.args[:1]
            elif name in MANY:
                yield node, [item.value if isinstance(item, ast.Starred) else item for item in node.args]


def is_named(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def of_temporaries(source: str) -> list[int]:
    """The lines on which the address of a temporary is taken."""
    tree = ast.parse(source)
    calls = list(taken(tree))
    lines = [call.lineno for call, tensors in calls if not all(map(is_held, tensors))]
    known = {id(call) for call, _ in calls}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            takes = any(id(part) in known for part in ast.walk(node.elt))
            lines += [node.lineno for part in node.generators if takes and not is_held_collection(part.iter)]
    return lines


def without_device(source: str) -> list[int]:
    """The lines on which a new tensor is made and no device is named."""
    tree = ast.parse(source)
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for targets, value in pairs(node)
        if is_factory(value)
        for target in targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if is_factory(call.func) or (isinstance(call.func, ast.Name) and call.func.id in names)]
    return [call.lineno for call in made if not any(keyword.arg == "device" for keyword in call.keywords)]


def is_factory(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in FACTORIES and is_named(node.value, "torch")


def pairs(node: ast.Assign) -> Iterator[tuple[list[ast.expr], ast.expr]]:
    """Targets and values of `a = x` and of `a, b = x, y`."""
    yield node.targets, node.value
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from (([one], value) for one, value in zip(target.elts, node.value.elts, strict=False))


def test_only_one_file_takes_addresses() -> None:
    offences = [
        f"{name_of(file)}:{node.lineno}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr == "data_ptr"
        and name_of(file) not in {"ops/backends/cpu/addresses.py", *IDENTITY}
    ]
    assert not offences, f"these hand over addresses that addresses.py has not checked: {offences}"


def test_no_address_is_that_of_a_temporary() -> None:
    offences = [f"{name_of(file)}:{line}" for file in FILES for line in of_temporaries(file.read_text(encoding="utf-8"))]
    assert not offences, f"give the tensor a name that lives until the kernel is done: {offences}"


def test_every_new_tensor_names_its_device() -> None:
    files = [file for file in FILES if name_of(file).split("/")[0] in FLOORS]
    assert len(files) > 40
    offences = [f"{name_of(file)}:{line}" for file in files for line in without_device(file.read_text(encoding="utf-8"))]
    assert not offences, f"pass device=, that of the operands or addresses.CPU: {offences}"


# ---- the readers themselves: a guard that catches nothing would pass every test above --------------------------------

IMPORTS = """
from byteback.ops.backends.cpu.addresses import flat, known as at
from byteback.ops.backends.cpu import addresses
from byteback.ops.backends.cpu.block_grad import backward_of
"""


@pytest.mark.parametrize(
    ("line", "held"),
    [
        ("flat(key, d, 2)", True),
        ("flat(self.key, d, 2)", True),
        ("flat(pair[0], d, 2)", True),
        ("flat(None, d, 2)", True),
        ("[flat(t, d, 2) for t in (a, b, *(rest or (None, None)))]", True),
        ("[flat(t, d, n) for t, n in zip(tensors, (1, 2))]", True),
        ("key.data_ptr()", True),
        ("backward_of(*parts, *gate, activation)", True),
        ("key.contiguous().data_ptr()", False),
        ("kernels.backward_of(g.contiguous(), x)", False),
        ("flat(key.contiguous(), d, 2)", False),
        ("at(key.t())", False),
        ("addresses.last(key + 1, d, 2)", False),
        ("flat(x[mask], d, 2)", False),
        ("flat(x if ready else x.contiguous(), d, 2)", False),
        ("[flat(t, d, 2) for t in (a, b.contiguous())]", False),
        ("list(t.data_ptr() for t in map(dense, tensors))", False),
    ],
)
def test_the_reader_knows_a_temporary(line: str, held: bool) -> None:
    assert (of_temporaries(IMPORTS + line) == []) == held


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("torch.empty(2, device=x.device)", True),
        ("torch.empty_like(x)", True),
        ("x.new_zeros(2)", True),
        ("torch.empty(2)", False),
        ("torch.empty_strided((2,), (1,), dtype=torch.float32)", False),
        ("make = torch.zeros\nmake(2)", False),
        ("number, make = 1, torch.zeros\nmake(2)", False),
        ("torch.tensor(2.0)", False),
    ],
)
def test_the_reader_knows_a_tensor_without_a_device(line: str, named: bool) -> None:
    assert (without_device(line) == []) == named


# ---- addresses.py ----------------------------------------------------------------------------------------------------

LAST = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)


def test_what_fits_has_its_address() -> None:
    vector = torch.zeros(6)
    assert addresses.flat(vector[2:5], torch.float32, 3) == vector.data_ptr() + 8
    assert addresses.last(LAST, torch.float32, 120) == addresses.dense(LAST, torch.float32, 120) == LAST.data_ptr()
    assert addresses.part(LAST[:, 1:], torch.float32, 80, 3) == LAST.data_ptr() + 4
    for rank in (2, 3, 5):
        image = torch.zeros(2, *(4,) * (rank - 2), 3).movedim(-1, 1)
        assert addresses.last(image, torch.float32, image.numel()) == image.data_ptr()
    assert addresses.flat(None, torch.float32, 3) == addresses.last(None, torch.int8, 3) == 0
    assert addresses.flat(torch.zeros(0), torch.float32, 0) == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: addresses.flat(torch.zeros(3).double(), torch.float32, 3), TypeError),
        (lambda: addresses.flat(torch.zeros(3), torch.float32, 4), ValueError),
        (lambda: addresses.flat(torch.zeros(3, device="meta"), torch.float32, 3), ValueError),
        (lambda: addresses.flat(torch.zeros(6)[::2], torch.float32, 3), ValueError),
        (lambda: addresses.flat(torch.zeros(1).expand(3), torch.float32, 3), ValueError),
        (lambda: addresses.flat(LAST, torch.float32, 120), ValueError),
        (lambda: addresses.last(LAST.contiguous(), torch.float32, 120), ValueError),
        (lambda: addresses.last(LAST, torch.int8, 120), TypeError),
        (lambda: addresses.last(torch.zeros(2, 3, 4), torch.float32, 24), ValueError),
        (lambda: addresses.dense(LAST[..., 1:], torch.float32, 96), ValueError),
        (lambda: addresses.part(LAST[:, 1:], torch.float32, 80, 4), ValueError),
        (lambda: addresses.part(LAST.contiguous()[:, 1:], torch.float32, 80, 3), ValueError),
        (lambda: addresses.part(LAST[:, 1:, :2], torch.float32, 40, 3), ValueError),
    ],
)
def test_what_does_not_fit_is_refused(call: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"native kernel: got \d+ numbers of .* but it reads \d+ numbers of "):
        call()  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_tensor_without_memory_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.zeros(3)
    for tensor in (fake, torch._efficientzerotensor(3)):
        with pytest.raises(ValueError, match="without memory"):
            addresses.flat(tensor, torch.float32, 3)
