# SPDX-License-Identifier: Apache-2.0
"""Runs compiled PTX on the CPU, bit by bit: all threads of a launch in lockstep, as lanes of numpy arrays.

program.py       PTX text to instructions
memory.py        global and shared memory, with checks, and the meter of bank conflicts
lanes.py         registers, special registers, the mask of active threads; control flow
arithmetic.py    instructions of one thread
transfers.py     loads, stores, atomics, asynchronous copies
warps.py         shuffles, ldmatrix, products of tensor cores (mma.sync)
wgmma.py         products of tensor cores of sm_90
instructions.py  all of them
launches.py      launches of the GPU's backend on CPU tensors
cases.py         products and quantize against the reference
mutants.py       wrong code that the comparison must notice

An opcode that is not known raises an error. Lockstep means that races between threads are not seen, except copies that are
read before their wait.
"""
