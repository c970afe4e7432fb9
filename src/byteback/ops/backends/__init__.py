# SPDX-License-Identifier: Apache-2.0
"""Backends: the implementations of the operators.

    registry.py   which backend runs an operator on given tensors; the only place that decides it
    paths.py      the paths of the CPU (reference, generic, avx2, avx512vnni) and how a user chooses one
    reference/    plain PyTorch on any device: the meaning of every operator
    cpu/          the native library; the only importer of byteback._native
    meta.py       shapes only, for device="meta"; meta_quantizer.py: a quantizer's step there

A backend is a namespace with the functions that reference/__init__.py lists, with the same parameters. Arguments were checked
by the operator (ops/*.py) and are on one device. Every backend gives the same bits.
"""
