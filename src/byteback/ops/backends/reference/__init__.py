# SPDX-License-Identifier: Apache-2.0
"""The reference backend: what every operator means, in plain PyTorch, on any device."""
