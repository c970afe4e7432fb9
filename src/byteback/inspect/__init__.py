# SPDX-License-Identifier: Apache-2.0
"""Reports about models and machines. Nothing here changes a result.

    summary.py     which layers run in int8, and why the others do not
    health.py      clip, saturation and direction deviation of every quantized tensor
    memory.py      what a step stores for its backward pass, and its peak memory; tune_malloc
    verify.py      `byteback verify`: compares every native path with the reference, bit for bit
    doctor.py      `byteback doctor`: what this machine and this build can run
    old_paths.py   names that pickles of earlier versions refer to

The functions are public as `byteback.summary` and so on. The reports that they return are data, print as tables, and are shown
as HTML tables in a notebook.
"""
