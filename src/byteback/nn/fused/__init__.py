# SPDX-License-Identifier: Apache-2.0
"""Fused blocks: a convolution with its norm, residual add and activation. A block reads int8 and writes int8.

lazy.py         LazyConv, a tensor that records the stages after a convolution, and when a convolution returns one
block.py        the description of a block, and the autograd function that computes it
norm.py         the norm of a block, its gradient, and the residual
sources.py      LazyActivation, the tensor between two blocks, and how its values are computed
pooling.py      concatenations and pools of activations
step.py         a training step in one call per direction
activations.py  how a model can write each activation
"""
