# SPDX-License-Identifier: Apache-2.0
"""A convolution with its norm, residual add and activation as one block, which reads int8 and writes int8.

lazy.py      LazyConv, the tensor that waits for the stages after a convolution, and when a convolution returns one
block.py     the description of a block, and the autograd function that computes it
norm.py      the norm of a block, its gradient, and the residual
sources.py   LazyActivation, the tensor between two blocks, and how its values are computed
pooling.py   concatenations and pools of activations

activations.py lists how a model can write each activation.
"""
