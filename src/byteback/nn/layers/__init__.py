# SPDX-License-Identifier: Apache-2.0
"""The int8 layers. Read `layer.py` (the base class), `conv.py`, `linear.py`, then `numerics.py` (the state of a layer),
`weights.py` (the weights of a frozen layer), `computed.py` (weights that are computed), `calls.py` (how calls are counted),
`float_table.py` (layers that are faster in float), `subclass.py` (subclasses by users), `transforms.py` (torch.fx, torch.jit,
torch.func) and what else is part of a block: `block_module.py`, `block_stages.py` (norms, ReLUs) and `frozen_norm.py`.
"""
