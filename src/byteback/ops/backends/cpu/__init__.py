# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: the native library, and the only importer of byteback._native.

    library.py     loads the library and says which paths it can run here
    addresses.py   from tensors to addresses, with the last checks
    allocator.py   memory that is used again
    backend.py     the backend of one path: the functions of the files below
    products.py    quantize.py    statistics.py    block.py    norm.py    block_grad.py    pooling.py    one file per family
    detect.py      two float operators of detectors

Where the library cannot take a case, such as clips along an unusual axis, the functions call the reference themselves.
"""
