# SPDX-License-Identifier: Apache-2.0
"""What is recorded during training: `watch.py` numerics of layers, `histograms.py` of gradients, `board.py` for TensorBoard."""
