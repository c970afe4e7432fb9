# SPDX-License-Identifier: Apache-2.0
"""The limits that hold for every compiled kernel, and the table of the products."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

import byteback
from byteback.ops.backends.triton.quantize import quantize_packing
from byteback.ops.contract.layout import channels_last
from gpu_check.compiled import AMD, NVIDIA, TURING, Code, inspected
from gpu_check.recorded import Launch, recording, train

RECIPES = ("distribution-adaptive-int8", "unified-int8")
TARGETS = (*NVIDIA, *AMD, TURING)
PRODUCTS = ("conv_output.conv_output", "conv_grad_input.conv_grad_input", "conv_grad_weight.grad_weight")
MOST_REGISTERS = {"sm": 208, "gf": 512}
MOST_SHARED = 99 * 1024  # of one program on sm_86, sm_89 and sm_120

_S8 = {"sm": r"(mma\.sync|wgmma\.mma_async).*s32\.s8\.s8", "gfx": r"v_mfma_i32_\w*i8"}


def recorded() -> list[Launch]:
    """Returns what a training step in both recipes launches, each kernel with its constants once."""
    seen: dict[Launch, int] = {}
    for recipe in (*RECIPES, byteback.UnifiedInt8(stream="bfloat16")):
        with recording() as launches:
            train(recipe)
        seen |= launches
    with recording() as launches:  # of a layer without a block
        x = channels_last(torch.empty(128, 64, 28, 28, device="meta"))
        quantize_packing(x, x.new_empty(1, 64, 1, 1), torch.empty(2, dtype=torch.int64, device="meta"), True)
    return list(seen | launches)


def core(launches: Iterable[Launch]) -> list[Launch]:
    """Returns all launches of products, and one of each other kernel and activation, with and without bfloat16: that with most
    constants set."""
    chosen: dict[object, Launch] = {}
    for made in launches:
        activation = tuple(value for name, value in made.constants if name in ("ACT", "GATE"))
        half = any(kind in ("*bf16", "*i16") for kind in made.types)
        key = made if made.name in PRODUCTS else (made.name, activation, half)
        if key not in chosen or _switched_on(made) > _switched_on(chosen[key]):
            chosen[key] = made
    return list(chosen.values())


def largest(launches: Iterable[Launch]) -> list[Launch]:
    """Returns each product with its largest tile."""

    def size(made: Launch) -> int:
        constants = dict(made.constants)
        return constants["BM"] * constants["BN"]

    kept = list(launches)
    return [max((made for made in kept if made.name == name), key=size) for name in PRODUCTS]


def _switched_on(made: Launch) -> int:
    return sum(int(value) for name, value in made.constants if isinstance(value, bool))


def faults(made: Launch, target: str, code: Code) -> list[str]:
    """Returns which limits a kernel breaks on a target."""
    found = []
    if code.spills:
        found.append(f"{code.spills} bytes of registers are spilled")
    if code.registers > MOST_REGISTERS[target[:2]]:
        found.append(f"{code.registers} registers")
    if code.shared > MOST_SHARED:
        found.append(f"{code.shared} bytes of shared memory")
    if made.name in PRODUCTS and not code.count(_S8["sm" if target.startswith("sm") else "gfx"]):
        found.append("no int8 tensor-core instruction")
    if not target.startswith("sm"):
        return found
    if made.name == PRODUCTS[2] and code.count(r"(ld|st)\.shared\.[bsu]8"):
        found.append("shared memory is accessed byte by byte")
    if code.count(r"fma\.rn"):
        found.append("fused multiply-add: it rounds once instead of twice")
    if code.count(r"div\.(full|approx)|rcp\.approx|sqrt\.approx"):
        found.append("approximate division or root")
    if code.count(r"(?!cvt\.rmi).*\.ftz"):  # floor(y + u) is never of a subnormal number: u is at least 2^-17
        found.append("subnormal numbers are flushed")
    return found


def runs_on(name: str, target: str) -> bool:
    """Whether a target runs a kernel, by its name."""
    return target != TURING or name not in (*PRODUCTS, "conv_grad_weight.pack")


def check(launches: list[Launch], targets: Iterable[str], say: Callable[[str], None] = lambda _: None) -> list[str]:
    """Compiles every kernel for every target. Returns the faults."""
    found = []
    for target in targets:
        own = [made for made in launches if runs_on(made.name, target)]
        for made in own:
            try:
                broken = faults(made, target, inspected(made, target))
            except Exception as error:
                broken = [f"does not compile: {type(error).__name__}: {str(error)[:200]}"]
            found += [f"{made.name} on {target}: {what} ({dict(made.constants)})" for what in broken]
        say(f"{target}: {len(own)} kernels, {len(found)} faults so far")
    return found


def table(launches: list[Launch], targets: Iterable[str] = (*NVIDIA, *AMD)) -> list[str]:
    """Returns the rows of the table in docs/13-gpus.md: the products with the largest tiles on every target."""
    rows = [
        "| product | tile | target | s8 products | loop | registers | spills | shared memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for made in largest(launches):
        size = dict(made.constants)
        for target in targets:
            code = inspected(made, target)
            products = code.count(_S8["sm" if target.startswith("sm") else "gfx"])
            tile = f"{size['BM']} x {size['BN']} x {size['BK']}"
            loop = sum(code.loop.values()) if target.startswith("sm") else "-"
            cells = (made.name.split(".")[1], tile, target, products, loop, code.registers, code.spills, f"{code.shared:,}")
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows
