# SPDX-License-Identifier: Apache-2.0
"""Registers all instructions."""

from gpu_check.ptx import arithmetic, transfers, warps, wgmma

__all__ = ["arithmetic", "transfers", "warps", "wgmma"]
