# SPDX-License-Identifier: Apache-2.0
"""The numeric contract: definitions that every backend implements with the same bits.

limits.py        the constants of the contract
scale_rule.py    along which axes a scale may vary
layout.py        the memory format of the result of a product
noise.py         the noise of stochastic rounding
rounded_once.py  quotients and square roots that are rounded once
exponential.py   e^t as a fixed sequence of operations
geometry.py      stride, padding, dilation, groups and sizes as plain integers
"""
