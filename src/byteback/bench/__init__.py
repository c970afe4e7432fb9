# SPDX-License-Identifier: Apache-2.0
"""Measuring: `byteback bench kernels`, `byteback verify`, `byteback doctor`.

`shapes.py` lists the layers of real networks, `kernels.py` times their three products against PyTorch FP32,
`verify.py` compares every path with the reference on this machine, `doctor.py` says what this machine can run and why.
"""
