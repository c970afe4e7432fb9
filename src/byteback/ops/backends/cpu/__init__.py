# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: the native library. Only this folder imports byteback._native.

    library.py     loads the library and checks which paths can run here
    addresses.py   checks tensors and returns their addresses
    allocator.py   reuses memory
    backend.py     the backend of one path: the functions of the files below
    products.py    quantize.py    statistics.py    block.py    norm.py    block_grad.py    pooling.py    one file per family
    detect.py      two float operators of detectors

If the library does not support a case, such as clips along an unusual axis, the functions call the reference.
"""
