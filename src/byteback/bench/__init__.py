# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `byteback bench kernels | step | memory | recipes | growth | inference | detect`.

`shapes.py` lists the layers of real networks, `kernels.py` times their three products against PyTorch FP32, and `peaks.py` says
what share of the machine's peak they reach.
`step.py` times a whole training step: it starts `step_worker.py` in new processes, which run `training_step.py` and split the
time with `step_parts.py`. `memory.py` starts the same processes for the peak alone. `recipes.py`, `growth.py` and
`inference.py` use the same steps, `detect.py` times a detector.
"""
