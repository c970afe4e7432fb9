# SPDX-License-Identifier: Apache-2.0
"""FLOOR 5: the trainer behind `byteback train`.

`config.py` says what to run, `data.py` brings the images, `loop.py` trains one network, `side_by_side.py` trains several
recipes on the same seed and data order and compares them.
"""
