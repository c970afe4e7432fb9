# SPDX-License-Identifier: Apache-2.0
"""Guard pages: every native function on operands and results that touch forbidden memory, on every path.

"No read outside a tensor, not even of a byte that is thrown away", says csrc/README.md. Here each buffer ends exactly where a
page without any permission begins (and, a second time, begins where one ends), so that a read or a write of one byte too many
is a fault. What the function returns must also be what it returns on ordinary memory.

    memory.py          buffers beside a guard page
    shapes.py          sizes that fill no vector, block or tile
    calls_*.py         one call for each function of the native library
    calls.py           all of them by name, and the functions that need none
    __main__.py        runs them; a fault kills the process, so tests/ops/test_guard_pages.py starts it as another one
"""
