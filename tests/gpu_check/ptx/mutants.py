# SPDX-License-Identifier: Apache-2.0
"""Wrong PTX of sm_80 that the comparison with the reference must notice. Else the comparison would prove nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from gpu_check import report
from gpu_check.against_reference import PRODUCTS, product, quantize, quantize_packing, sum_of_slices
from gpu_check.ptx import cases
from gpu_check.ptx.launches import Emulator, emulated
from gpu_check.ptx.memory import Fault


class Mutant(NamedTuple):
    kernel: str
    change: Callable[[str], str]
    check: cases.Check


def _replaced(pattern: str, by: str, count: int = 0) -> Callable[[str], str]:
    return lambda ptx: re.sub(pattern, by, ptx, count=count, flags=re.M)


def _first(pattern: str, ptx: str) -> str:
    found = re.search(pattern, ptx, re.M)
    assert found is not None, pattern
    return found[1]


def _narrow(ptx: str) -> str:
    """Cuts the int64 sum of the slices to int32 after each addition."""
    loaded = _first(r"ld\.global\.v2\.b32 \{ (%r\d+), ", ptx)
    term = _first(rf"cvt\.s64\.s32 \s*(%rd\d+), {loaded};", ptx)
    return re.sub(
        rf"(add\.s64 \s*(%rd\d+), %rd\d+, {term};)", r"\1\n\tcvt.u32.u64 %r99999, \2;\n\tcvt.s64.s32 \2, %r99999;", ptx
    )


def _longer(ptx: str) -> str:
    """Leaves one group of copies more under way at each wait."""
    return re.sub(r"wait_group\s+([1-9]);", lambda found: f"wait_group {int(found[1]) + 1};", ptx)


_OUTPUT, _GRAD_INPUT, _GRAD_WEIGHT = report.PRODUCTS
_PACK, _FINISH, _QUANTIZE = "conv_grad_weight.pack", "conv_grad_weight.finish", "quantize.quantize"

_no_wait = _replaced(r"^\s*cp\.async\.wait_group\s+\d+;", "")
_swapped = _replaced(r"^(\s*mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+),", r"\1\3, \2,", 1)
_other_byte = _replaced(r"0x7771U?;", "0x7772U;", 1)
_loads_all = _replaced(r"(cp\.async\.c[ag]\S+ \[[^]]*\], \[[^]]*\], )(0x\w+), %r\d+;", r"\1\2, \2;")
_stores_all = _replaced(r"@%p\d+ (st\.global)", r"\1")
_packs_all = _replaced(r"@%p\d+ (st\.global\.v4)", r"\1")
_one_phase = _replaced(r"(mov\.u32 \s*%r\d+, )%ctaid\.z;", r"\g<1>0;")
_other_noise = _replaced(r"^\s*xor\.b32 ", "\tor.b32 ", 1)

_output, _grad_input, _grad_weight = (partial(product, kind, cases.QUICK) for kind in PRODUCTS)

MUTANTS = {
    "output: a missing wait": Mutant(_OUTPUT, _no_wait, _output),
    "grad_weight: waits that leave one group too many": Mutant(_GRAD_WEIGHT, _longer, _grad_weight),
    "grad_weight: a wrong permutation of the registers of a tile": Mutant(_GRAD_WEIGHT, _swapped, _grad_weight),
    "pack: a wrong permutation of bytes": Mutant(_PACK, _other_byte, _grad_weight),
    "output: loads without their mask": Mutant(_OUTPUT, _loads_all, _output),
    "output: stores without their mask": Mutant(_OUTPUT, _stores_all, _output),
    "grad_input: a wrong phase": Mutant(_GRAD_INPUT, _one_phase, _grad_input),
    "grad_weight: slices added in int32": Mutant(_FINISH, _narrow, sum_of_slices),
    "quantize: a packed copy without its mask": Mutant(_QUANTIZE, _packs_all, quantize_packing),
    "quantize: a wrong step of the noise": Mutant(_QUANTIZE, _other_noise, partial(quantize, 1, True)),
}


def survivors(say: Callable[[str], None], names: tuple[str, ...] = tuple(MUTANTS)) -> list[str]:
    """Returns the mutants that nothing notices."""
    found = []
    for name in names:
        how = _noticed(MUTANTS[name])
        say(f"mutant, {name}: {how or 'NOT NOTICED'}")
        found += [] if how else [f"nothing notices the mutant {name!r}"]
    return found


def _noticed(mutant: Mutant) -> str:
    """Returns how a mutant is noticed: other bits, or an access that the memory refuses."""

    def change(kernel: str, ptx: str) -> str:
        if kernel != mutant.kernel:
            return ptx
        changed = mutant.change(ptx)
        assert changed != ptx, "the mutant changes nothing"
        return changed

    with emulated(Emulator("sm_80", change)):
        try:
            mutant.check()
        except Fault as fault:
            return f"noticed, {str(fault).partition(':')[0]}"
        except AssertionError as error:
            if not str(error).startswith("tensor"):  # not the comparison, but this program
                raise
            return "noticed, other bits"
    return ""
