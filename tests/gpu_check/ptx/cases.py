# SPDX-License-Identifier: Apache-2.0
"""Products and quantize by a target's PTX: what is compared with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from gpu_check import report
from gpu_check.against_reference import PRODUCTS, Shape, product, quantize, quantize_packing, sum_of_slices
from gpu_check.ptx.launches import Emulator, emulated

QUICK = Shape((17, 32, 5, 4), (32, 32, 3, 3), [2, 2], [1, 1], [1, 1])
ONE = [1, 1]
SHAPES = {
    "3 x 3 with stride 2, two groups of images": QUICK,
    "3 x 3, channels not a multiple of 16": Shape((3, 20, 6, 5), (33, 20, 3, 3), ONE, ONE, ONE, last=False),
    "1 x 1, 128 channels, tiles of 128 x 128": Shape((18, 128, 3, 3), (128, 128, 1, 1), ONE, [0, 0], ONE, processors=1),
    "3 x 3 with stride 2, large tiles": Shape((4, 64, 10, 9), (128, 64, 3, 3), [2, 2], ONE, ONE, processors=1),
    "stride 3 and 2, dilation, groups": Shape((2, 32, 9, 8), (64, 16, 3, 2), [2, 3], [1, 0], [2, 1], 2),
    "one axis": Shape((18, 32, 9), (16, 32, 3), [2], [1], [1]),
    "three axes": Shape((2, 16, 3, 4, 4), (32, 16, 2, 2, 2), [1, 2, 2], [1, 1, 0], [1, 1, 1]),
}

KERNELS = {*report.PRODUCTS, "conv_grad_weight.pack", "conv_grad_weight.finish", "quantize.quantize"}

Check = Callable[[], None]


def checks(quick: bool) -> dict[str, Check]:
    shapes = {"3 x 3 with stride 2": QUICK} if quick else SHAPES
    made: dict[str, Check] = {
        f"{kind}: {name}": partial(product, kind, shape) for name, shape in shapes.items() for kind in PRODUCTS
    }
    made["sum of slices beyond int32"] = sum_of_slices
    made["quantize with noise, one clip per channel"] = partial(quantize, 1, True)
    if not quick:
        made["quantize with noise and a packed copy"] = quantize_packing
        made["quantize to the nearest, one clip"] = partial(quantize, -1, False)
        made["quantize with noise, one clip per image, contiguous"] = partial(quantize, 0, True, last=False)
    return made


def run(targets: Iterable[str], quick: bool, say: Callable[[str], None]) -> list[str]:
    """Runs all checks on every target. Returns the faults."""
    found = []
    for target in targets:
        begin, made = time.monotonic(), checks(quick)
        with emulated(Emulator(target)) as emulator:
            for name, check in made.items():
                try:
                    check()
                except Exception as error:
                    found.append(f"{target}, PTX, {name}: {type(error).__name__}: {str(error)[:300]}")
        idle = {name for name in KERNELS if report.runs_on(name, target)} - set(emulator.launched)
        found += [f"{target}, PTX: {name} was not run" for name in sorted(idle)]
        factors = conflicts(emulator)
        found += [
            f"{target}, PTX: bank conflicts, {name}: factor {factor:.2f}" for name, factor in factors.items() if factor > 1
        ]
        say(f"{target}: bank conflicts in {len(factors)} kinds of access: factor {max(factors.values()):.2f} at most")
        say(f"{target}: PTX of {len(made)} checks ran in {time.monotonic() - begin:.0f} s, {len(found)} faults so far")
    return found


def conflicts(emulator: Emulator) -> dict[str, float]:
    """Returns, for each kernel and kind of access of shared memory, its wavefronts over those without bank conflicts."""
    ordered = sorted(emulator.waves.items())
    return {f"{name.split('.')[1]} {kind}": took / least for (name, kind), (took, least) in ordered}
