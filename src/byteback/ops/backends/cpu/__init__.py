# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: operators by the native library, with the bits of the reference."""
