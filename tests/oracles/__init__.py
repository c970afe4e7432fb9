# SPDX-License-Identifier: Apache-2.0
"""What every operator of floor 0 means, in numpy: the judge of the fuzz and of the tests of `tests/ops`.

Written from the contract (docs/1-scale-and-integer.md and the operators' docstrings), not from `src`: no line of it is imported
here, and no convolution or statistic of PyTorch is used. Arrays in, arrays out; tensors enter by `.numpy()`.

    bits.py        how two results are compared
    products.py    the three products and the matrix product, in int64
    quantize.py    noise, quantize and its clips
    statistics.py  ordered float64 sums and what is made of them
    norms.py       the arithmetic of a norm per channel
    passes.py      the passes of the fused block
    clips.py       magnitude-aware clips, and what a quantizer writes down
    pools.py       max-pool and single pixels
"""
