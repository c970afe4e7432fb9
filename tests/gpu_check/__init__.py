# SPDX-License-Identifier: Apache-2.0
"""What can be proven about the GPU's kernels without a GPU (`make gpu-check`).

recorded.py    a training step on device="meta" with the backend of GPUs: no look at a value, and which kernels it launches
compiled.py    those kernels compiled for every target, and what the code consists of
report.py      the limits that hold for each kernel, and the table in docs/13-gpus.md
"""
