# SPDX-License-Identifier: Apache-2.0
"""The int8 layers. Read `layer.py` (what they share), `conv.py`, `linear.py`, then `numerics.py` (what a layer remembers),
`weights.py` (what a frozen layer keeps), `calls.py` (how calls are counted), `float_table.py` (where float is faster),
`subclass.py` (layers of a user's own class), `transforms.py` (recorders and transforms) and `frozen_norm.py`.
"""
