# SPDX-License-Identifier: Apache-2.0
"""Backends: the implementations of the operators.

    registry.py   chooses the backend that runs an operator on given tensors
    paths.py      the paths of the CPU (reference, generic, avx2, avx512vnni) and how to choose one
    reference/    plain PyTorch on any device: the definition of every operator
    cpu/          the native library; only this folder imports byteback._native
    triton/       the kernels of GPUs; gpu.py says which GPUs they run on
    meta.py       shapes only, for device="meta"; meta_quantizer.py has the step of a quantizer

A backend is a namespace with the functions listed in reference/__init__.py, with the same parameters. The operator (ops/*.py)
has checked the arguments, and all tensors are on one device. Every backend gives the same bits.
"""
