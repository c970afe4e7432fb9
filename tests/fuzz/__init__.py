# SPDX-License-Identifier: Apache-2.0
"""Drawn cases of every operator of floor 0, on every path, against the oracles of tests/oracles. `make fuzz` runs it.

A case is a flat dictionary of plain numbers and words, drawn from fields that do not depend on each other. So every combination
is a valid case, and a failing one is made smaller by trying simpler values field by field.

    fields.py         what can be drawn, and what is simpler
    operands.py       tensors of a pattern, in a layout
    kind_*.py         the operators: fields, call, expected result
    harness.py        runs a case on every path; makes a failing one smaller
    workers.py        processes, so that a crash is a finding and not the end
    __main__.py       the command line
    test_fixed.py     a few hundred fixed cases, for `make test`
"""
