# SPDX-License-Identifier: Apache-2.0
"""Measuring: `byteback bench kernels | step | growth | inference | detect`, `byteback verify`, `byteback doctor`.

`shapes.py` lists the layers of real networks, `kernels.py` times their three products against PyTorch FP32.
`step.py` times a whole training step: it starts `step_worker.py` in fresh processes, which run `training_step.py` and
take it apart with `step_parts.py`. `verify.py` compares every path with the reference on this machine, `doctor.py` says
what this machine can run and why.
"""
