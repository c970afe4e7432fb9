# SPDX-License-Identifier: Apache-2.0
"""Backends: who runs an operator. `reference/` is the meaning in plain PyTorch, `cpu/` the native library."""
