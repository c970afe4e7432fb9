# SPDX-License-Identifier: Apache-2.0
"""The numeric contract: what every backend must agree on, to the last bit.

limits.py        the numbers of the contract
scale_rule.py    along which axes a scale may vary
layout.py        the memory format of a product's result
noise.py         the noise of stochastic rounding
rounded_once.py  quotients and square roots that are rounded once
exponential.py   e^t as a fixed sequence of operations
geometry.py      stride, padding, dilation, groups and sizes as plain integers
"""
