# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one file per family. Only the folder above imports them.

    conv_output, conv_grad_input, conv_grad_weight   the three products with tensor cores
    depthwise                                        the three products of a depthwise convolution
    quantize                                         floats to int8, the noise key, maxima
    sums                                             float64 sums with defined order
    norm, norm_grad                                  the passes of a fused block
    pool                                             max-pooling
    ledger                                           the state of a quantizer

Rules for the same bits as the reference: launch.py compiles without fused multiply-add; float32 quotients are `tl.div_rn`;
floats are never summed with tl.sum, whose order is not defined. The interpreter has no inline assembly and no libdevice.
"""
